"""For those who write their own tests: the oracle in double precision, and the case tables of this project.

    o, state = testing.oracle(q, k, v, g, beta, output_final_state=True)
    torch.autograd.gradcheck(lambda *x: testing.oracle(*x)[0], inputs)
    verdicts = [testing.check(line) for line in testing.table("edges")]

The oracle is the token recurrence in float64, with gradients; a case is one line of text.
"""

from .cases import Case, Tolerance, case, check, expand, table, tables, tolerance
from .oracle import oracle

__all__ = ["Case", "Tolerance", "case", "check", "expand", "oracle", "table", "tables", "tolerance"]
