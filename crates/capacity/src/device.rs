//! Hardware by name: published figures, and the share of them that was reached where it was measured. Decides no
//! time itself. Units: bytes, bytes a second, floating-point operations a second, seconds.

use crate::CapacityError;
use crate::dtype::Arithmetic;
use serde::Serialize;

/// A way between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Link {
    /// Bytes a second in one direction, of one rank.
    pub bytes_per_s: f64,
    /// Seconds of an all-reduce or all-gather of nothing.
    pub collective_s: f64,
    /// Seconds of a send of nothing.
    pub send_s: f64,
}

/// What is reached of the published figures, and what each launch costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Efficiency {
    /// Share of the memory bandwidth that matrix products reach on large weights.
    pub weight_read: f64,
    /// Share of the memory bandwidth that decode attention reaches on K and V.
    pub kv_read: f64,
    /// Share of the peak that large f16/bf16 products reach for seconds on end.
    pub half_products: f64,
    /// The same for FP8.
    pub fp8_products: f64,
    /// Share of the f16/bf16 peak that causal prefill attention reaches.
    pub attention: f64,
    /// Share of a link's bandwidth that large messages reach.
    pub link: f64,
    /// Seconds that every matrix product takes beyond its bytes: launch, ramp-up and tail, and waiting for its input.
    pub product_s: f64,
    /// The same for every small kernel (norms, rope, KV write, attention, activation).
    pub kernel_s: f64,
    /// Seconds of scheduling and sampling for each sequence of a step, not hidden behind the device.
    pub sequence_s: f64,
}

/// Hardware that a rank runs on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Device {
    /// `a100-80g`, …
    pub name: String,
    /// Memory of a rank.
    pub memory_bytes: u64,
    /// Bytes a second from that memory, published (or measured, see `basis`).
    pub memory_bytes_per_s: f64,
    /// Dense f16/bf16 operations a second.
    pub half_flops_per_s: f64,
    /// Dense FP8 operations a second, where there is such hardware.
    pub fp8_flops_per_s: Option<f64>,
    /// int8 operations a second with quantised weights, where they are not dequantised first.
    pub quantised_flops_per_s: Option<f64>,
    /// Between ranks of one host.
    pub host_link: Link,
    /// Between hosts.
    pub fabric_link: Link,
    /// Ranks of one host.
    pub ranks_per_host: usize,
    /// Whether the memory is everybody's (a CPU's): the KV pool then takes half of what is left.
    pub shared_memory: bool,
    /// Shares of the figures above.
    pub efficiency: Efficiency,
    /// What of this was measured and what is assumed.
    pub basis: &'static str,
}

/// Calibrated on one H200 (`docs/capacity.md`): 4.47 of 4.8 TB/s on large reads, 3.9 TB/s in paged attention, 670 of
/// 989 bf16 TFLOP/s for two seconds, and what each launch adds to cuBLAS's and vLLM's steps.
const MEASURED: Efficiency = Efficiency {
    weight_read: 0.93,
    kv_read: 0.81,
    half_products: 0.68,
    fp8_products: 0.65,
    attention: 0.50,
    link: 0.75,
    product_s: 5.5e-6,
    kernel_s: 4.0e-6,
    sequence_s: 7.0e-6,
};

/// 1,700 of 2,039 GB/s: what the authors of gpt-fast saw on A100-80GB, in the same proportion for K and V.
const A100: Efficiency = Efficiency { weight_read: 0.83, kv_read: 0.72, ..MEASURED };

const MIB: u64 = 1 << 20;
const TERA: f64 = 1e12;
const GIGA: f64 = 1e9;

/// NVLink within the host. 14 µs an all-reduce of a few KB fits gpt-fast's A100 figures at tp 2, 4 and 8.
const fn nvlink(bytes_per_s: f64) -> Link {
    Link { bytes_per_s, collective_s: 14e-6, send_s: 8e-6 }
}

/// PCIe 4.0 x16 within the host, through the host's memory; latencies assumed.
const PCIE: Link = Link { bytes_per_s: 32.0 * GIGA, collective_s: 30e-6, send_s: 12e-6 };

/// One network adapter a GPU, as in NVIDIA's DGX systems; latencies assumed.
const fn fabric(bytes_per_s: f64) -> Link {
    Link { bytes_per_s, collective_s: 20e-6, send_s: 20e-6 }
}

/// 100 Gbit/s Ethernet shared by eight GPUs; latencies assumed.
const ETHERNET: Link = Link { bytes_per_s: 1.5625 * GIGA, collective_s: 50e-6, send_s: 40e-6 };

/// A row of the table below: name, memory in MiB as the driver reports it, published bandwidth in GB/s, dense bf16 and
/// FP8 TFLOP/s with f32 sums, links, basis.
struct Row(&'static str, u64, f64, f64, Option<f64>, Link, Link, Efficiency, &'static str);

const AS_H200: &str = "published figures; their efficiency is assumed to be the H200's";
const A100_BASIS: &str = "published figures; bandwidth and all-reduce latency calibrated on published single-batch runs, \
                          the rest of the efficiency assumed to be the H200's";

/// Sources: NVIDIA's data sheets: A100 (June 2021), H100 (SXM5) and H200 (bf16 and FP8 without sparsity), L4, L40S, and
/// the Ada architecture whitepaper (RTX 4090). NVLink 600 and 900 GB/s are both directions together. DGX A100 has
/// 200 Gbit/s a GPU between hosts, DGX H100 and H200 400 Gbit/s.
#[rustfmt::skip]
const DEVICES: &[Row] = &[
    Row("a100-40g", 40_960, 1555.0, 312.0, None, nvlink(300.0 * GIGA), fabric(25.0 * GIGA), A100, A100_BASIS),
    Row("a100-80g", 81_920, 2039.0, 312.0, None, nvlink(300.0 * GIGA), fabric(25.0 * GIGA), A100, A100_BASIS),
    Row("h100-80g", 81_559, 3350.0, 989.4, Some(1978.9), nvlink(450.0 * GIGA), fabric(50.0 * GIGA), MEASURED, AS_H200),
    Row("h200", 143_771, 4800.0, 989.4, Some(1978.9), nvlink(450.0 * GIGA), fabric(50.0 * GIGA), MEASURED,
        "published figures; efficiency measured on one H200, links assumed"),
    Row("l4", 23_034, 300.0, 121.0, Some(242.0), PCIE, ETHERNET, MEASURED, AS_H200),
    Row("l40s", 46_068, 864.0, 362.0, Some(733.0), PCIE, ETHERNET, MEASURED, AS_H200),
    Row("rtx-4090", 24_564, 1008.0, 165.2, Some(330.3), PCIE, ETHERNET, MEASURED, AS_H200),
];

/// Figures of a CPU, measured by the caller or given by a person.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CpuFigures {
    /// Memory that may be taken.
    pub memory_bytes: u64,
    /// Bytes a second that all its threads read.
    pub memory_bytes_per_s: f64,
    /// f32 operations a second.
    pub f32_flops_per_s: f64,
    /// int8 operations a second.
    pub int8_flops_per_s: Option<f64>,
    /// Whether they were given rather than measured.
    pub given: bool,
}

impl Device {
    /// The device called `name`, in any case.
    ///
    /// # Errors
    /// [`CapacityError::Unknown`] with the known names.
    pub fn named(name: &str) -> Result<Self, CapacityError> {
        let lower = name.to_ascii_lowercase();
        let Some(&Row(name, mib, gb_per_s, half, fp8, host_link, fabric_link, efficiency, basis)) =
            DEVICES.iter().find(|row| row.0 == lower)
        else {
            return Err(CapacityError::Unknown { key: "device", value: name.to_owned(), known: Self::names() });
        };
        Ok(Self {
            name: name.to_owned(),
            memory_bytes: mib * MIB,
            memory_bytes_per_s: gb_per_s * GIGA,
            half_flops_per_s: half * TERA,
            fp8_flops_per_s: fp8.map(|tera| tera * TERA),
            quantised_flops_per_s: None,
            host_link,
            fabric_link,
            ranks_per_host: 8,
            shared_memory: false,
            efficiency,
            basis,
        })
    }

    /// All names, for messages.
    #[must_use]
    pub fn names() -> String {
        let names: Vec<&str> = DEVICES.iter().map(|row| row.0).chain(["cpu"]).collect();
        names.join(", ")
    }

    /// A CPU host: one rank, sums through its own memory, 10 Gbit/s Ethernet to the next (both assumed).
    #[must_use]
    pub fn cpu(figures: &CpuFigures) -> Self {
        Self {
            name: "cpu".to_owned(),
            memory_bytes: figures.memory_bytes,
            memory_bytes_per_s: figures.memory_bytes_per_s,
            half_flops_per_s: figures.f32_flops_per_s,
            fp8_flops_per_s: None,
            quantised_flops_per_s: figures.int8_flops_per_s,
            host_link: Link { bytes_per_s: figures.memory_bytes_per_s / 3.0, collective_s: 5e-6, send_s: 2e-6 },
            fabric_link: Link { bytes_per_s: 1.25 * GIGA, collective_s: 40e-6, send_s: 30e-6 },
            ranks_per_host: 1,
            shared_memory: true,
            efficiency: Efficiency {
                weight_read: 0.8,
                kv_read: 0.5,
                half_products: 0.5,
                fp8_products: 0.5,
                attention: 0.25,
                link: 0.8,
                product_s: 5e-6,
                kernel_s: 5e-6,
                sequence_s: 10e-6,
            },
            basis: if figures.given {
                "bandwidth and operations as given; their efficiency and all latencies are assumed"
            } else {
                "bandwidth and operations measured here; their efficiency and all latencies are assumed"
            },
        }
    }

    /// Operations a second that products reach.
    pub(crate) fn products_per_s(&self, arithmetic: Arithmetic) -> f64 {
        let half = self.half_flops_per_s * self.efficiency.half_products;
        match arithmetic {
            Arithmetic::Half => half,
            Arithmetic::Fp8 => self.fp8_flops_per_s.map_or(half, |flops| flops * self.efficiency.fp8_products),
            Arithmetic::Quantised => {
                self.quantised_flops_per_s.map_or(half, |flops| flops * self.efficiency.half_products)
            }
        }
    }

    /// Whether FP8 weights are multiplied as FP8.
    pub(crate) fn has_fp8(&self) -> bool {
        self.fp8_flops_per_s.is_some()
    }

    /// Bytes of an activation.
    pub(crate) fn activation_bytes(&self) -> f64 {
        if self.shared_memory { 4.0 } else { 2.0 }
    }

    /// Bytes a second of weights and activations.
    pub(crate) fn read_bytes_per_s(&self) -> f64 {
        self.memory_bytes_per_s * self.efficiency.weight_read
    }

    /// Bytes a second of K and V.
    pub(crate) fn kv_bytes_per_s(&self) -> f64 {
        self.memory_bytes_per_s * self.efficiency.kv_read
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_a_device() {
        for row in DEVICES {
            let device = Device::named(row.0).unwrap();
            assert!(device.memory_bytes > 20 << 30 && device.memory_bytes < 150 << 30, "{}", row.0);
            // The machine balance of all of them lies between 100 and 500 operations a byte.
            let balance = device.half_flops_per_s / device.memory_bytes_per_s;
            assert!((100.0..500.0).contains(&balance), "{}: {balance}", row.0);
            assert!(device.fp8_flops_per_s.is_none_or(|fp8| (1.9..2.1).contains(&(fp8 / device.half_flops_per_s))));
        }
    }

    #[test]
    fn an_unknown_name_gets_the_known_ones() {
        let error = Device::named("tpu").unwrap_err().to_string();
        assert!(error.starts_with("device = tpu: ") && error.contains("a100-80g") && error.contains("cpu"), "{error}");
    }

    #[test]
    fn an_a100_multiplies_fp8_weights_at_its_bf16_rate() {
        let a100 = Device::named("A100-80G").unwrap();
        assert!((a100.products_per_s(Arithmetic::Fp8) - a100.products_per_s(Arithmetic::Half)).abs() < 1.0);
        let h200 = Device::named("h200").unwrap();
        assert!(h200.products_per_s(Arithmetic::Fp8) > 1.8 * h200.products_per_s(Arithmetic::Half));
    }
}
