"""Layouts: orders of axes that images are computed in."""

from __future__ import annotations

from typing import Literal

Layout = Literal["nhwc", "chwn"]
