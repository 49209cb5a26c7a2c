"""Observers that hand a run's numbers to other programs; each needs a library of its own, when it is made.

::

    from evener.training.reporting.loggers.csv import CsvFile
    from evener.training.reporting.loggers.tensorboard import TensorBoard
    from evener.training.reporting.loggers.wandb import WandB
    from evener.training.reporting.loggers.mlflow import MLflow
"""
