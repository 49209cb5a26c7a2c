"""Observers that pass a run's numbers to other programs. Each needs its own library when it is created.

::

    from evener.training.reporting.loggers.csv import CsvFile
    from evener.training.reporting.loggers.prometheus import MetricsFile
    from evener.training.reporting.loggers.tensorboard import TensorBoard
    from evener.training.reporting.loggers.wandb import WandB
    from evener.training.reporting.loggers.trackio import Trackio
    from evener.training.reporting.loggers.mlflow import MLflow
"""
