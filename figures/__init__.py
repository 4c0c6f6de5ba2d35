"""Tables, figures and the HTML report, drawn from tidy tables alone.

In: a directory of tidy tables (``schemas/tidy``) and the published values (``published.csv``).
Out: ``python -m figures tables|plots|report``. Imports neither torch nor anything of fp4core or eval, so
that a
results directory can be redrawn on any machine. The same input gives the same bytes.
"""
