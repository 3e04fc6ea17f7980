"""Renders reports: tables with notes, as text and as HTML, and plots."""

from ._plots import (
    BEFORE as BEFORE,
    FORMAT_STYLES as FORMAT_STYLES,
    KEPT as KEPT,
    OTHER_STYLES as OTHER_STYLES,
    REFERENCE_LINE as REFERENCE_LINE,
    UNSCALED as UNSCALED,
    Bars as Bars,
    FormatRange as FormatRange,
    Histogram as Histogram,
    Panel as Panel,
    find_style as find_style,
    list_styles as list_styles,
    make_figure as make_figure,
    make_note as make_note,
    plot_bars as plot_bars,
    plot_heat_map as plot_heat_map,
    plot_histograms as plot_histograms,
)
from ._report import (
    Column as Column,
    Report as Report,
    Table as Table,
    draw_document as draw_document,
    draw_html_note as draw_html_note,
    find_largest as find_largest,
    find_row as find_row,
    is_fitting as is_fitting,
    list_lines as list_lines,
    make_columns as make_columns,
    make_plain as make_plain,
)
from ._wording import (
    choose_byte_unit as choose_byte_unit,
    format_bytes as format_bytes,
    format_count as format_count,
    list_places as list_places,
    name_place as name_place,
    shorten_dtypes as shorten_dtypes,
    shorten_policy as shorten_policy,
)
