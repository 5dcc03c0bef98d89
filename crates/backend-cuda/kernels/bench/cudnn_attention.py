"""cuDNN's and PyTorch's flash attention at the shapes of attention_prefill_bench.cu, timed in the same call."""
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def time_us(fn, count=4, replays=9):
    for _ in range(3):
        fn()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            fn()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / count)
    return sorted(times)[len(times) // 2]


for s, n in [(1, 2048), (1, 8192), (16, 512), (1, 32768)]:
    q = torch.randn(s, 32, n, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(s, 8, n, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for name, backend in [("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)]:
        with sdpa_kernel(backend):
            us = time_us(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        print(f"{name} e128 {s:3} x q {n:5}: {us:9.2f} us {4 * 32 * 128 * n * (n + 1) / 2 * s / us / 1e6:6.1f} TFLOP/s")
