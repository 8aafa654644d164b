# SPDX-License-Identifier: Apache-2.0
"""Builds the mining network with TensorRT on a card, checks it against PyTorch, and measures it beside the roofline.

    python3 -m benchmarks.gpu.mining_engine --layers 4 --rows 8 16 64 --formats bfloat16 fp8 --out FOLDER

Needs the TensorRT 10.6 libraries and bindings on LD_LIBRARY_PATH and PYTHONPATH, PyTorch, and a card. Weights are
random with the extents of a 7-billion-parameter dense model. Each engine is optimised for one number of rows of 128
tokens, the per-step token budget, since that is what a contract states. Times are medians over `--repeats` launches
after warm-up; the roofline is an 8192-cubed product in the same process, before and after.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes

from engines.graph.tensorrt_lowering import ProfileRange, build_plan
from engines.mining.layer import Fp8Scales
from engines.mining.network import build_network
from engines.model_config import ModelShape

if TYPE_CHECKING:
    from engines.graph.ir import Graph

ROW_TOKENS = 128


class RandomWeights:
    """Weights of a seeded model, made on the card when asked for, kept on the host in bfloat16."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        import torch

        self._kept: dict[str, Any] = {}
        generator = torch.Generator(device="cuda").manual_seed(seed)
        hidden, inner = shape.hidden_size, shape.intermediate_size

        def make(name: str, *extents: int, mean: float = 0.0, deviation: float = 0.02) -> None:
            value = torch.randn(*extents, generator=generator, device="cuda") * deviation + mean
            self._kept[name] = value.to(torch.bfloat16)

        make("model.embed_tokens.weight", shape.vocab_size, hidden, deviation=1.0)
        make("model.norm.weight", hidden, mean=1.0)
        for index in range(shape.layers):
            prefix = f"model.layers.{index}"
            make(f"{prefix}.input_layernorm.weight", hidden, mean=1.0)
            make(f"{prefix}.post_attention_layernorm.weight", hidden, mean=1.0)
            for word, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
                make(f"{prefix}.self_attn.{word}_proj.weight", heads * shape.head_size, hidden)
            make(f"{prefix}.self_attn.o_proj.weight", hidden, hidden)
            make(f"{prefix}.mlp.gate_proj.weight", inner, hidden)
            make(f"{prefix}.mlp.up_proj.weight", inner, hidden)
            make(f"{prefix}.mlp.down_proj.weight", hidden, inner)

    def torch(self, name: str) -> Any:
        """The weight on the card."""
        return self._kept[name]

    def __getitem__(self, name: str) -> Any:
        import torch

        return self._kept[name].cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def torch_reference(
    shape: ModelShape, weights: RandomWeights, feeds: dict[str, Any], largest: dict[str, float] | None = None
) -> Any:
    """The same model in PyTorch; notes the largest magnitude at each input of a weight product in `largest`."""
    import torch
    from torch.nn import functional

    def note(index: int, name: str, x: Any) -> None:
        if largest is not None:
            largest[f"layers_{index}.{name}"] = x.abs().max().item()

    ids, positions, segments = (feeds[k].long() for k in ("input_ids", "positions", "segments"))
    x = functional.embedding(ids, weights.torch("model.embed_tokens.weight"))
    rows, tokens, _ = x.shape
    half = shape.head_size // 2
    frequency = shape.rope_theta ** (-torch.arange(half, device="cuda", dtype=torch.float64) / half)
    angle = (positions[..., None].double() * frequency).float()
    cosine, sine = (torch.cat((f, f), -1)[:, None] for f in (angle.cos(), angle.sin()))
    order = torch.arange(tokens, device="cuda")
    allowed = (segments[:, None, :, None] == segments[:, None, None, :]) & (order[:, None] >= order)

    def norm(x: Any, name: str) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + shape.norm_epsilon)).to(
            x.dtype
        ) * weights.torch(name)

    def rotate(x: Any) -> Any:
        wide = x.float()
        turned = torch.cat((-wide[..., half:], wide[..., :half]), -1)
        return (wide * cosine + turned * sine).to(x.dtype)

    for index in range(shape.layers):
        prefix = f"model.layers.{index}"

        def linear(x: Any, name: str, prefix: str = prefix) -> Any:
            return functional.linear(x, weights.torch(f"{prefix}.{name}.weight"))

        normed = norm(x, f"{prefix}.input_layernorm.weight")
        note(index, "qkv", normed)
        q, k, v = (
            linear(normed, f"self_attn.{w}_proj").view(rows, tokens, -1, shape.head_size).transpose(1, 2) for w in "qkv"
        )
        attended = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask=allowed, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(rows, tokens, -1)
        note(index, "o", attended)
        x = x + linear(attended, "self_attn.o_proj")
        normed = norm(x, f"{prefix}.post_attention_layernorm.weight")
        note(index, "mlp", normed)
        product = functional.silu(linear(normed, "mlp.gate_proj")) * linear(normed, "mlp.up_proj")
        note(index, "down", product)
        x = x + linear(product, "mlp.down_proj")
    last = x.reshape(rows * tokens, -1)[feeds["last_rows"].long()]
    return norm(last, "model.norm.weight")


def flops(shape: ModelShape, rows: int) -> float:
    """Floating-point operations of one launch: weight products and both attention products, all tokens."""
    weights = shape.hidden_size * shape.head_size * (2 * shape.heads + 2 * shape.kv_heads)
    weights += 3 * shape.hidden_size * shape.intermediate_size
    attention = 2 * ROW_TOKENS * shape.heads * shape.head_size
    return 2.0 * rows * ROW_TOKENS * shape.layers * (weights + attention)


def make_feeds(shape: ModelShape, rows: int, seed: int) -> dict[str, Any]:
    """Full rows: one prompt of 128 tokens each."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    ids = torch.randint(0, shape.vocab_size, (rows, ROW_TOKENS), generator=generator, device="cuda", dtype=torch.int32)
    positions = torch.arange(ROW_TOKENS, device="cuda", dtype=torch.int32).expand(rows, -1).contiguous()
    last = torch.arange(1, rows + 1, device="cuda", dtype=torch.int32) * ROW_TOKENS - 1
    return {"input_ids": ids, "positions": positions, "segments": torch.zeros_like(ids), "last_rows": last}


def timed(launch: Any, repeats: int, warm: int = 5) -> list[float]:
    """Milliseconds of each of `repeats` launches, by device events."""
    import torch

    for _ in range(warm):
        launch()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in marks]


def rooflines() -> dict[str, float]:
    """TFLOP/s of an 8192-cubed product in bfloat16 and in scaled FP8."""
    import torch

    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    count = 2.0 * size**3 / 1e9
    found = {"bfloat16": count / statistics.median(timed(lambda: a @ b, 20))}
    one = torch.ones((), device="cuda")
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    product = lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
    found["fp8"] = count / statistics.median(timed(product, 20))
    return found


class Runner:
    """One engine and its context on the current stream."""

    def __init__(self, trt: Any, logger: Any, plan: bytes) -> None:
        self.trt = trt
        self.runtime = trt.Runtime(logger)
        self.engine = self.runtime.deserialize_cuda_engine(plan)
        self.context = self.engine.create_execution_context()

    def bind(self, feeds: dict[str, Any], hidden_size: int) -> Any:
        """Binds inputs and a fresh output; returns the output, bfloat16 [prompts, hidden_size]."""
        import torch

        listed = {self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)}
        for name, value in feeds.items():
            if name not in listed:
                continue
            self.context.set_input_shape(name, tuple(value.shape))
            self.context.set_tensor_address(name, value.data_ptr())
        self.output = torch.empty((feeds["last_rows"].numel(), hidden_size), dtype=torch.bfloat16, device="cuda")
        self.context.set_tensor_address("hidden", self.output.data_ptr())
        return self.output

    def launch(self) -> None:
        """Enqueues one launch."""
        import torch

        if not self.context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise RuntimeError("the launch was refused")

    def breakdown(self, repeats: int) -> list[tuple[str, float]]:
        """Milliseconds a launch of each layer of the plan, largest first."""
        times: dict[str, float] = {}

        class Profiler(self.trt.IProfiler):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()

            def report_layer_time(self, name: str, ms: float) -> None:
                times[name] = times.get(name, 0.0) + ms

        self.context.profiler = Profiler()
        for _ in range(repeats):
            self.launch()
            import torch

            torch.cuda.synchronize()
        return sorted(((name, ms / repeats) for name, ms in times.items()), key=lambda pair: -pair[1])


def main() -> None:
    """Builds, checks and measures what the command line asks for."""
    import tensorrt_bindings as trt
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "fp8"])
    parser.add_argument("--layouts", nargs="+", choices=["packed", "own-rows"], default=["packed", "own-rows"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--breakdown", action="store_true")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile beside it")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.cuda.init()
    logger = trt.Logger(trt.Logger.WARNING)
    shape = ModelShape(arguments.layers, 4096, 11008, 32, 32, 128, 32000, 1e-5, 10000.0)
    weights = RandomWeights(shape, 7)
    feeds = make_feeds(shape, 8, 3)
    largest: dict[str, float] = {}
    expected = torch_reference(shape, weights, feeds, largest)
    scales = Fp8Scales({name: value / 448.0 for name, value in largest.items()})
    before = rooflines()
    print("roofline TFLOP/s", before, flush=True)
    rows_out: list[dict[str, Any]] = []
    cache = b""
    for number_format, layout in itertools.product(arguments.formats, arguments.layouts):
        for rows in arguments.rows:
            graph: Graph = build_network(
                shape, weights, packed=layout == "packed", scales=scales if number_format == "fp8" else None
            )
            begin = time.perf_counter()
            plan, cache = build_plan(
                trt,
                logger,
                graph,
                {"rows": ProfileRange(1, rows, max(rows, 8)), "prompts": ProfileRange(1, rows, max(rows, 8) * 4)},
                workspace_bytes=16 << 30,
                detailed=True,
                timing_cache=cache,
            )
            built = time.perf_counter() - begin
            runner = Runner(trt, logger, plan)
            output = runner.bind(feeds, shape.hidden_size)
            runner.launch()
            torch.cuda.synchronize()
            cosine = torch.nn.functional.cosine_similarity(output.float(), expected.float()).min().item()
            work = make_feeds(shape, rows, 5)
            runner.bind(work, shape.hidden_size)
            times = timed(runner.launch, arguments.repeats)
            ms = statistics.median(times)
            rate = flops(shape, rows) / ms / 1e9
            row = {
                "format": number_format,
                "layout": layout,
                "rows": rows,
                "ms": ms,
                "ms_min": min(times),
                "ms_max": max(times),
                "tflops": rate,
                "of_roofline": rate / before[number_format],
                "tokens_per_s": rows * ROW_TOKENS / ms * 1e3,
                "cosine_min": cosine,
                "build_s": built,
                "plan_bytes": len(plan),
            }
            rows_out.append(row)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            if arguments.breakdown:
                row["layers"] = runner.breakdown(5)
                for name, part in row["layers"][:14]:
                    print(f"   {part:8.4f} ms  {name[:100]}", flush=True)
            if arguments.compile and (number_format, layout) == ("bfloat16", arguments.layouts[0]):
                compiled = torch.compile(partial(torch_reference, shape, weights))
                row["torch_compile_ms"] = statistics.median(timed(partial(compiled, work), arguments.repeats))
                print("   torch.compile", row["torch_compile_ms"], "ms", flush=True)
            del runner
    after = rooflines()
    (arguments.out / "mining_engine.json").write_text(
        json.dumps({"before": before, "after": after, "rows": rows_out}, indent=1)
    )
    print("roofline TFLOP/s after", after)


if __name__ == "__main__":
    main()
