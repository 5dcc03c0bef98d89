//! Weights that are repeated on the device, and the device's clock.

use crate::support::{ACTIVATIONS, Random, gpu, host, scalar, tensor};
use pagemill_backend::{Backend, DType, DeviceMeter, Launching, WeightDesc};
use pagemill_backend_cuda::Activations;
use std::time::Duration;

#[test]
fn a_supply_is_repeated_over_a_weight() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = scalar();
        // Shorter than the supply, a little longer, many times as long and no multiple, and quantised.
        for (dtype, rows, cols, supply_blocks) in [
            (DType::BF16, 3, 17, 4099),
            (DType::F16, 1, 4100, 4099),
            (DType::F32, 257, 33, 101),
            (DType::BF16, 1003, 640, 777),
            (DType::Q8_0, 65, 64, 7),
        ] {
            let mut random = Random::new(rows as u64);
            let supply: Vec<u8> = match dtype {
                DType::F32 => random.normal(supply_blocks).into_iter().flat_map(f32::to_le_bytes).collect(),
                // Below the exponents that are no numbers.
                _ => (0..supply_blocks * dtype.block_bytes()).map(|i| (i * 37 % 64) as u8).collect(),
            };
            let run = |backend: &dyn Backend| {
                let desc = WeightDesc { name: "w".into(), dtype, rows, cols };
                let weight = backend.load_repeated(desc, &supply).unwrap();
                let ids: Vec<u32> = (0..rows as u32).collect();
                let mut out = tensor(backend, rows, cols, &vec![f32::NAN; rows * cols]);
                backend.embed(&weight, &ids, 1.0, &mut out).unwrap();
                host(backend, &out)
            };
            assert_eq!(run(&gpu), run(&cpu), "{activations:?} {dtype} [{rows}, {cols}]");
        }
    }
}

#[test]
fn passes_are_timed_and_really_run() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    // Once to warm up, once to bring a record to the device, three times to be timed.
    for (launching, runs) in [(Launching::Queued, 4), (Launching::Recorded, 5)] {
        let mut x = tensor(&gpu, 3, 5, &[1.0; 15]);
        let times = gpu.time(launching, 3, &mut || gpu.scale(&mut x, 2.0)).unwrap();
        assert_eq!(times.len(), 3, "{launching:?}");
        assert!(times.iter().all(|&time| time > Duration::ZERO && time < Duration::from_millis(50)), "{times:?}");
        assert_eq!(host(&gpu, &x), [f32::powi(2.0, runs); 15], "{launching:?}");
    }
}

#[test]
fn work_that_fails_leaves_the_device_usable() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let mut calls = 0;
    let mut x = tensor(&gpu, 1, 4, &[1.0; 4]);
    let failed = gpu.time(Launching::Recorded, 1, &mut || {
        calls += 1;
        let mut wrong = gpu.temp(1, if calls > 1 { 5 } else { 4 })?;
        gpu.add(&mut wrong, &x)
    });
    assert!(failed.is_err() && calls == 2, "{calls} calls");
    gpu.scale(&mut x, 3.0).unwrap();
    assert_eq!(host(&gpu, &x), [3.0; 4]);
}

#[test]
fn reading_is_between_a_slow_and_an_impossible_rate() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let rate = gpu.read_bytes_per_second(1 << 30).unwrap();
    assert!((5e10..5e13).contains(&rate), "{rate} bytes/s");
}
