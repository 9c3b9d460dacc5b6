# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Array shapes in annotations, such as `Float[Tensor, "tokens experts"]`. They work with and without jaxtyping.

So the parts of this package that other training loops use (hooks, audit, metrics) only need torch and numpy.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
    from jaxtyping import Num as Num
    from jaxtyping import Shaped as Shaped
    from jaxtyping import UInt8 as UInt8
else:
    try:
        from jaxtyping import Bool, Float, Int, Num, Shaped, UInt8
    except ModuleNotFoundError:

        class Shaped:
            """Array of any type: `Shaped[Tensor, "tokens"]` is `Tensor`."""

            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Float = Int = Num = UInt8 = Shaped
