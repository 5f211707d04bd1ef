"""What a vision tower is made of, and what an image costs in it."""

from dataclasses import dataclass
from typing import Any

from torch import nn

PER_TOKEN = ("merger", "deepstack_merger_list")
"""Parts that work on tokens, each of merge x merge patches; all others work on patches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShape:
    """What the cost of an image depends on: all parameters, weights of matrices that each patch and each token goes
    through, values of a patch, layers and how many of them let all patches of an image see each other, widths, and the
    sides, in patches, of the other layers' windows and of a token. `gated` layers have RMS norms and three matrices in
    their feed-forward; `kept` numbers of width `intermediate` wait there for the backward pass."""

    parameters: int
    patch_weights: int
    token_weights: int
    patch_values: int
    layers: int
    full_layers: int
    hidden: int
    intermediate: int
    gated: bool
    kept: int
    window: int
    merge: int

    @classmethod
    def of(cls, tower: nn.Module, config: Any) -> "TowerShape":
        """Read a tower of the Qwen-VL family, which may lie on the meta device, and its configuration."""
        matrices = {
            name: module.weight.numel()
            for name, module in tower.named_modules()
            if isinstance(module, (nn.Linear, nn.Conv3d))
        }
        per_token = sum(count for name, count in matrices.items() if name.split(".")[0] in PER_TOKEN)
        feed_forward = [count for name, count in matrices.items() if name.startswith("blocks.0.mlp.")]
        hidden = getattr(config, "embed_dim", config.hidden_size)
        gated = len(feed_forward) == 3
        window = getattr(config, "window_size", 0) // config.patch_size // config.spatial_merge_size
        return cls(
            parameters=sum(parameter.numel() for parameter in tower.parameters()),
            patch_weights=sum(matrices.values()) - per_token,
            token_weights=per_token,
            patch_values=matrices["patch_embed.proj"] // hidden,
            layers=config.depth,
            full_layers=len(getattr(config, "fullatt_block_indexes", range(config.depth))),
            hidden=hidden,
            intermediate=feed_forward[0] // hidden,
            gated=gated,
            kept=4 if gated else 3 if config.hidden_act == "quick_gelu" else 2,
            window=window * config.spatial_merge_size,
            merge=config.spatial_merge_size,
        )

    def forward_flops(self, grid: tuple[int, int, int]) -> float:
        """One forward pass over an image of `grid` patches (frames, rows, columns).

        2 x weights for each patch and token, and 4 x hidden for each pair of patches that see each other in a layer
        (scores and values): all pairs of a frame, or those of its windows, which are smaller at its far sides.
        """
        frames, rows, columns = grid
        patches = frames * rows * columns
        weights = self.patch_weights * patches + self.token_weights * patches / self.merge**2
        pairs = self.full_layers * (rows * columns) ** 2
        if self.full_layers < self.layers:
            pairs += (self.layers - self.full_layers) * self._squares(rows) * self._squares(columns)
        return 2.0 * weights + 4.0 * self.hidden * frames * pairs

    def activation_bytes(self, width: int, *, checkpointing: bool) -> int:
        """Bytes per patch that wait for the backward pass, computed in numbers of `width` bytes.

        Each of two norms: input and output, of RMS norms also the scaled input, the first in float32. Attention:
        queries, keys and values as one matrix made them, queries and keys as turned, its output by image and in one
        piece. The pixels, and about four widths around the layers.
        """
        norms = 2 * self.hidden * ((4 + 2 * width) if self.gated else 2 * width)
        layer = norms + width * (7 * self.hidden + self.kept * self.intermediate)
        layers = self.layers * self.hidden * width + layer if checkpointing else self.layers * layer
        return layers + self.patch_values * width + self.hidden * (4 + 4 * width)

    def _squares(self, side: int) -> int:
        """Sum of the squares of the windows' lengths along a side."""
        whole, rest = divmod(side, self.window)
        return whole * self.window**2 + rest**2
