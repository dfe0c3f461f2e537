from pipeline.api.loaded_run import load_run as load_run
from pipeline.api.trainer import Trainer as Trainer
from pipeline.api.trainer import run as run
from pipeline.config.compose import load_recipe as load_recipe
from pipeline.core.host.signals import Interrupted as Interrupted
from pipeline.engine.sink import sink as sink

__all__ = ["Interrupted", "Trainer", "load_recipe", "load_run", "run", "sink"]
