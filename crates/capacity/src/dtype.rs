//! Element types by name: how many bytes a weight or a KV element takes, and at which rate it is multiplied.
//! Knows no model.

use crate::CapacityError;
use serde::Serialize;

/// The arithmetic of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Arithmetic {
    /// f16 or bf16 on matrix units, summed in f32 (on a CPU: f32). Quantised weights are dequantised on the way in.
    Half,
    /// FP8 weights and activations; [`Half`](Self::Half) on hardware without them.
    Fp8,
    /// Quantised weights: int8 products on a CPU, [`Half`](Self::Half) elsewhere.
    Quantised,
}

/// How weights are stored: whole blocks of `block_values` weights in `block_bytes` bytes, scales included.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WeightType {
    /// `bf16`, `fp8`, `q4_0`, …
    pub name: String,
    /// Weights in a block.
    pub block_values: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Whether embedding and head stay bf16, as the checkpoints of this type keep them.
    pub vocabulary_in_bf16: bool,
    /// Products.
    pub arithmetic: Arithmetic,
}

/// Name, aliases, weights and bytes in a block, whether embedding and head stay bf16, products. FP8 is counted without
/// its scales (one a channel or tensor: below 0.1 %); int8 and int4 carry one f16 scale for 128 weights; the others
/// are GGUF's blocks as ggml defines them.
type Row = (&'static str, &'static [&'static str], u64, u64, bool, Arithmetic);
const WEIGHT_TYPES: &[Row] = &[
    ("bf16", &["bfloat16"], 1, 2, false, Arithmetic::Half),
    ("f16", &["fp16", "float16"], 1, 2, false, Arithmetic::Half),
    ("f32", &["fp32", "float32"], 1, 4, false, Arithmetic::Half),
    ("fp8", &["fp8-e4m3", "fp8_e4m3", "e4m3"], 1, 1, true, Arithmetic::Fp8),
    ("int8", &["q8"], 128, 130, true, Arithmetic::Quantised),
    ("int4", &["q4"], 128, 66, true, Arithmetic::Quantised),
    ("q8_0", &[], 32, 34, false, Arithmetic::Quantised),
    ("q6_k", &[], 256, 210, false, Arithmetic::Quantised),
    ("q5_k", &[], 256, 176, false, Arithmetic::Quantised),
    ("q5_1", &[], 32, 24, false, Arithmetic::Quantised),
    ("q5_0", &[], 32, 22, false, Arithmetic::Quantised),
    ("q4_k", &[], 256, 144, false, Arithmetic::Quantised),
    ("q4_1", &[], 32, 20, false, Arithmetic::Quantised),
    ("q4_0", &[], 32, 18, false, Arithmetic::Quantised),
    ("q3_k", &[], 256, 110, false, Arithmetic::Quantised),
    ("q2_k", &[], 256, 84, false, Arithmetic::Quantised),
];

impl WeightType {
    /// The type called `name`, in any case.
    ///
    /// # Errors
    /// [`CapacityError::Unknown`] with the known names.
    pub fn named(name: &str) -> Result<Self, CapacityError> {
        let lower = name.to_ascii_lowercase();
        let row = WEIGHT_TYPES.iter().find(|row| row.0 == lower || row.1.contains(&lower.as_str()));
        let &(name, _, block_values, block_bytes, vocabulary_in_bf16, arithmetic) =
            row.ok_or_else(|| CapacityError::Unknown {
                key: "dtype",
                value: name.to_owned(),
                known: WEIGHT_TYPES.iter().map(|row| row.0).collect::<Vec<_>>().join(", "),
            })?;
        Ok(Self { name: name.to_owned(), block_values, block_bytes, vocabulary_in_bf16, arithmetic })
    }

    /// Weights as a file holds them: `stored_bytes` for `num_parameters` weights, whatever they are mixed of.
    #[must_use]
    pub fn as_stored(num_parameters: u64, stored_bytes: u64) -> Self {
        let wide = stored_bytes >= num_parameters.saturating_mul(2);
        Self {
            name: "as stored".to_owned(),
            block_values: num_parameters.max(1),
            block_bytes: stored_bytes,
            vocabulary_in_bf16: false,
            arithmetic: if wide { Arithmetic::Half } else { Arithmetic::Quantised },
        }
    }

    /// Bytes of `count` weights of the layers.
    #[must_use]
    pub fn bytes(&self, count: u64) -> u64 {
        let bytes = (u128::from(count) * u128::from(self.block_bytes)).div_ceil(u128::from(self.block_values.max(1)));
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// Bytes of `count` weights of embedding or head.
    #[must_use]
    pub fn vocabulary_bytes(&self, count: u64) -> u64 {
        if self.vocabulary_in_bf16 { count.saturating_mul(2) } else { self.bytes(count) }
    }

    /// Products with the head.
    pub(crate) fn vocabulary_arithmetic(&self) -> Arithmetic {
        if self.vocabulary_in_bf16 { Arithmetic::Half } else { self.arithmetic }
    }

    /// Bits a weight, scales included.
    #[must_use]
    pub fn bits(&self) -> f64 {
        8.0 * self.block_bytes as f64 / self.block_values as f64
    }
}

/// How K and V are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // the names say it
pub enum KvType {
    F16,
    Bf16,
    F32,
    Fp8,
    /// With one f32 scale for each token and head.
    Int8,
}

impl KvType {
    /// The type called `name`.
    ///
    /// # Errors
    /// [`CapacityError::Unknown`] with the known names.
    pub fn named(name: &str) -> Result<Self, CapacityError> {
        Ok(match name.to_ascii_lowercase().as_str() {
            "f16" | "fp16" | "float16" | "auto" => Self::F16,
            "bf16" | "bfloat16" => Self::Bf16,
            "f32" | "float32" => Self::F32,
            "fp8" | "fp8-e4m3" | "fp8_e4m3" => Self::Fp8,
            "int8" => Self::Int8,
            _ => {
                return Err(CapacityError::Unknown {
                    key: "kv_dtype",
                    value: name.to_owned(),
                    known: "f16, bf16, f32, fp8, int8".to_owned(),
                });
            }
        })
    }

    /// Bytes of the K (or V) of one head of one token.
    #[must_use]
    pub fn head_bytes(self, head_dim: usize) -> u64 {
        let elements = head_dim as u64;
        match self {
            Self::F16 | Self::Bf16 => 2 * elements,
            Self::F32 => 4 * elements,
            Self::Fp8 => elements,
            Self::Int8 => elements + 4,
        }
    }

    /// As in [`named`](Self::named).
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn bytes_by_hand() {
        for (name, count, bytes) in
            [("bf16", 1000, 2000), ("fp8", 1000, 1000), ("q4", 1280, 660), ("int8", 1280, 1300), ("Q4_K", 512, 288)]
        {
            assert_eq!(WeightType::named(name).unwrap().bytes(count), bytes, "{name}");
        }
        let fp8 = WeightType::named("fp8").unwrap();
        assert_eq!((fp8.bytes(10), fp8.vocabulary_bytes(10)), (10, 20));
        assert_eq!(WeightType::as_stored(100, 50).bytes(30), 15);
        assert_eq!((KvType::Int8.head_bytes(128), KvType::Fp8.head_bytes(128)), (132, 128));
    }

    #[test]
    fn unknown_types_get_the_known_names() {
        let error = WeightType::named("int3").unwrap_err().to_string();
        assert!(error.starts_with("dtype = int3: ") && error.contains("bf16") && error.contains("q4_k"), "{error}");
        let error = KvType::named("int2").unwrap_err().to_string();
        assert!(error.starts_with("kv_dtype = int2: ") && error.contains("fp8"), "{error}");
    }
}
