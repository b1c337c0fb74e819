"""CPU tensors that are treated as CUDA would treat them: autocast's lists, and the attention kernel.

A trace runs on fake CPU tensors, because fake CUDA tensors need a CUDA context at their first backward. But
autocast casts other operations on a CPU than on CUDA (layer_norm and softmax stay in half precision there),
and scaled_dot_product_attention may take the kernel that keeps the whole matrix of weights. Both decide
what a step holds. The replacement of autocast's kernels is for the whole process and for good: use it in a
process that does nothing else.

The lists are those of torch's aten/src/ATen/autocast_mode.h (AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE),
documented as "CUDA Ops that Autocast to float32"; operations that autocast to half precision are the same.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
FLOAT32_BY_DTYPE = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
HALVES = (torch.float16, torch.bfloat16)


@functools.cache  # once a process
def install_autocast_lists() -> torch.library.Library:
    """Gives CPU autocast the float32 lists of CUDA, for this process and for good."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each kernel that is replaced: that is the purpose
        for name in FLOAT32.split():
            library.impl(name, _in_float32(_operation(name)))
        for name in FLOAT32_BY_DTYPE.split():
            library.impl(name, _with_dtype_float32(_operation(name)))
    return library


def _operation(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _below_autocast(operation: Any) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def call(*arguments: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*arguments, **options)

    return call


def _in_float32(operation: Any) -> Callable[..., Any]:
    """The operation with its half-precision arguments as float32."""
    below, cast = _below_autocast(operation), _below_autocast(torch.ops.aten.to.dtype)

    def convert(tensor: Tensor) -> Tensor:
        return cast(tensor, torch.float32) if tensor.dtype in HALVES else tensor

    def call(*arguments: Any, **options: Any) -> Any:
        arguments, options = tree_map_only(Tensor, convert, (arguments, options))
        return below(*arguments, **options)

    return call


def _with_dtype_float32(operation: Any) -> Callable[..., Any]:
    """The operation on its half-precision argument, asked for a float32 result if for no other."""
    below = _below_autocast(operation)
    position = [argument.name for argument in operation._schema.arguments].index("dtype")

    def call(*arguments: Any, **options: Any) -> Any:
        given = arguments[position] if len(arguments) > position else options.get("dtype")
        if given is None and arguments[0].dtype in HALVES:
            arguments, options = arguments[:position], options | {"dtype": torch.float32}
        return below(*arguments, **options)

    return call


@contextmanager
def flash_attention() -> Iterator[None]:
    """scaled_dot_product_attention by the kernel that keeps no matrix of weights, where CUDA has one.

    An attention mask goes to CUDA's memory-efficient kernel, which keeps none either.
    """
    original = torch.nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)
        output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
        return output

    torch.nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
