"""What vLLM's CPU backend needs on the side of its workers; nothing here is used on a GPU."""

from typing import Any


class FreshHead:
    """A worker extension (`--worker-extension-cls fastrl_fast.rollout.vllm_cpu.FreshHead`).

    On a CPU vLLM (0.32) keeps a repacked copy of every matrix. Its reload makes them anew layer by layer, but not the
    one of a head that is tied to the embedding, which would go on with the weights of the start.
    """

    def take_folder(self, path: str) -> None:
        """Load the weights that lie in a folder."""
        self._take(weights_path=path)

    def take_weights(self, named: Any) -> None:
        """Load full tensors by their transformers names, in the same process."""
        self._take(weights_iterator=named)

    def _take(self: Any, **source: Any) -> None:
        self.reload_weights(**source)
        if self.device.type != "cpu":
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for module in self.model_runner.get_model().modules():
            if hasattr(module, "cpu_linear") and module.weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
