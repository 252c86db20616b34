"""Which function serves an op, and whether it can say so."""

from octavo.kernels import dispatch, reference


def test_the_reference_serves_where_there_is_no_kernel_and_says_so():
    ops = dispatch.reference_ops("there are no kernels for meta")
    assert ops.rms_norm is reference.rms_norm
    assert ops.explain()["rope"].endswith("reference.rope: there are no kernels for meta")
