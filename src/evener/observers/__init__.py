"""Observers that hand a run's numbers to other programs; each needs a library of its own, when it is made.

::

    from evener.observers.csv_file import CsvFile
    from evener.observers.tensorboard import TensorBoard
    from evener.observers.wandb import WandB
    from evener.observers.mlflow import MLflow
"""
