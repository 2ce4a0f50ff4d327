"""The typed configuration: `base.yaml` is the reference of all keys, the other files are overlays for it."""

from configs.schema import Config, ConfigError, config_differences, dump_config, load_config

__all__ = ["Config", "ConfigError", "config_differences", "dump_config", "load_config"]
