"""Writing of plain data as YAML.

`safe_yaml`, which reads it, is another module, since importing OmegaConf's grammar takes 0.1 s.
"""

from __future__ import annotations

from typing import Any

import yaml
from omegaconf.omegaconf import get_omega_conf_dumper


def format_yaml(value: Any) -> str:
    """Return plain data as a YAML text, which `parse_yaml` reads back unchanged."""
    return yaml.dump(value, Dumper=get_omega_conf_dumper(), sort_keys=False)
