"""Dates as days since 1970, their formats, and their positions in a cycle."""

from __future__ import annotations

from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.table import DateColumn
from pipeline.data.tables.quantities import (
    FORMATS,
    ISO,
    compute_part_values,
    find_date_formats,
    format_example_date,
    list_date_parts,
    parse_days,
)

moments = st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)).map(
    lambda moment: moment.replace(second=0, microsecond=0)
)


@pytest.mark.medium
@given(moment=moments, date_format=st.sampled_from([name for name in FORMATS if " %H" in name]))
def test_days_count_from_1970_with_the_time_as_a_fraction(
    moment: datetime, date_format: str
) -> None:
    (days,) = parse_days([moment.strftime(date_format)], date_format)
    counted = datetime(1970, 1, 1) + timedelta(days=float(days))
    expected = moment if "%d" in date_format else moment.replace(day=1)
    assert abs(counted - expected) < timedelta(seconds=1)


@given(moment=moments)
def test_utc_offset_is_dropped_from_iso_dates(moment: datetime) -> None:
    text = moment.isoformat()
    assert parse_days([text], ISO) == parse_days([text + "+05:30"], ISO)


def test_invalid_date_is_nan() -> None:
    np.testing.assert_array_equal(
        np.isnan(parse_days(["2024-01-31", "2024-02-31", ""], ISO)), [False, True, True]
    )


@pytest.mark.parametrize("date_format", ["%a %b %d %H:%M:%S %Y", "%H:%M %d/%m/%y", "%Y %H %j"])
def test_time_may_stand_before_parts_of_the_day(date_format: str) -> None:
    moment = datetime(2021, 3, 4, 12)
    (days,) = parse_days([moment.strftime(date_format)], date_format)
    assert datetime(1970, 1, 1) + timedelta(days=float(days)) == moment


@pytest.mark.parametrize(
    ("texts", "formats"),
    [
        (["2024-01-31"], [ISO]),
        (["01/02/2024", "03/04/2024"], ["%d/%m/%Y", "%m/%d/%Y"]),
        (["01/02/2024", "31/04/2024"], []),
        (["01/02/2024", "31/05/2024"], ["%d/%m/%Y"]),
        (["12"], []),
        ([], []),
    ],
)
def test_date_formats_fit_every_text(texts: list[str], formats: list[str]) -> None:
    assert find_date_formats(texts) == formats


def test_example_date_matches_its_format() -> None:
    for date_format in FORMATS:
        assert not np.isnan(parse_days([format_example_date(date_format)], date_format)).any()
    with pytest.raises(ValueError, match="must be a format of dates with their year"):
        format_example_date("%d.%m.")


def test_day_cycle_requires_hours() -> None:
    assert "sin_day" not in list_date_parts(np.array([1.0, np.nan]))
    assert "sin_day" in list_date_parts(np.array([1.0, 2.5]))


@pytest.mark.medium
@given(moment=moments, cycle=st.sampled_from(["year", "week", "day"]))
def test_sine_and_cosine_encode_one_position(moment: datetime, cycle: str) -> None:
    days = parse_days([moment.isoformat(), "missing"], ISO)
    sin, cos = (
        compute_part_values(days, DateColumn(format=ISO, part=f"{wave}_{cycle}"))  # type: ignore[arg-type]
        for wave in ("sin", "cos")
    )
    assert sin[0] ** 2 + cos[0] ** 2 == pytest.approx(1)
    assert np.isnan([sin[1], cos[1]]).all()
    angle = np.arctan2(sin[0], cos[0]) / (2 * np.pi) % 1
    first = datetime(moment.year, 1, 1)
    year_days = (datetime(moment.year + 1, 1, 1) - first).days
    position = {
        "year": (moment - first).days / year_days,
        "week": moment.weekday() / 7,
        "day": (moment.hour * 60 + moment.minute) / 1440,
    }
    assert abs((angle - position[cycle] + 0.5) % 1 - 0.5) < 1e-6


def test_days_count_from_the_first_training_day() -> None:
    date = DateColumn(format=ISO, part="days", first_day=10.0)
    np.testing.assert_array_equal(compute_part_values(np.array([10.0, 12.5]), date), [0.0, 2.5])
