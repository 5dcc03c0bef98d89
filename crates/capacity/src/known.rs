//! Known shapes by name. The sizes are those of the `config.json` that each model's publisher put on Hugging Face
//! under the repository named beside it; the tests hold their sums to the published parameter counts.

use crate::{CapacityError, DecoderShape, LayerKv, Mlp};

/// A published configuration.
struct Known {
    name: &'static str,
    /// Repository whose `config.json` has these sizes.
    source: &'static str,
    /// `[D, H, K, E, I, V, layers, positions]`.
    sizes: [usize; 8],
    tied_embeddings: bool,
    layer: Layer,
}

/// What differs from Llama within a layer.
#[derive(Clone, Copy)]
enum Layer {
    /// Two norms of `D`.
    Llama,
    /// Biases on q, k and v.
    Qwen2,
    /// A window in every layer.
    Sliding(usize),
    /// Four norms of `D`, two of `E`; every sixth layer is full, the others keep this window.
    Gemma3(usize),
    /// Norms over the heads of q and k; this many experts, of which a token visits so many.
    Qwen3Experts(usize, usize),
    /// This many experts, of which a token visits so many.
    Experts(usize, usize),
}

#[rustfmt::skip]
const KNOWN: &[Known] = &[
    Known { name: "llama-2-7b", source: "meta-llama/Llama-2-7b-hf",
        sizes: [4096, 32, 32, 128, 11_008, 32_000, 32, 4096], tied_embeddings: false, layer: Layer::Llama },
    Known { name: "llama-2-13b", source: "meta-llama/Llama-2-13b-hf",
        sizes: [5120, 40, 40, 128, 13_824, 32_000, 40, 4096], tied_embeddings: false, layer: Layer::Llama },
    Known { name: "llama-2-70b", source: "meta-llama/Llama-2-70b-hf",
        sizes: [8192, 64, 8, 128, 28_672, 32_000, 80, 4096], tied_embeddings: false, layer: Layer::Llama },
    Known { name: "llama-3.1-8b", source: "meta-llama/Llama-3.1-8B",
        sizes: [4096, 32, 8, 128, 14_336, 128_256, 32, 131_072], tied_embeddings: false, layer: Layer::Llama },
    Known { name: "llama-3.1-70b", source: "meta-llama/Llama-3.1-70B",
        sizes: [8192, 64, 8, 128, 28_672, 128_256, 80, 131_072], tied_embeddings: false, layer: Layer::Llama },
    Known { name: "llama-3.1-405b", source: "meta-llama/Llama-3.1-405B",
        sizes: [16_384, 128, 8, 128, 53_248, 128_256, 126, 131_072], tied_embeddings: false, layer: Layer::Llama },
    Known { name: "llama-3.2-1b", source: "meta-llama/Llama-3.2-1B",
        sizes: [2048, 32, 8, 64, 8192, 128_256, 16, 131_072], tied_embeddings: true, layer: Layer::Llama },
    Known { name: "smollm2-135m", source: "HuggingFaceTB/SmolLM2-135M-Instruct",
        sizes: [576, 9, 3, 64, 1536, 49_152, 30, 8192], tied_embeddings: true, layer: Layer::Llama },
    Known { name: "qwen2.5-0.5b", source: "Qwen/Qwen2.5-0.5B-Instruct",
        sizes: [896, 14, 2, 64, 4864, 151_936, 24, 32_768], tied_embeddings: true, layer: Layer::Qwen2 },
    Known { name: "qwen2.5-7b", source: "Qwen/Qwen2.5-7B-Instruct",
        sizes: [3584, 28, 4, 128, 18_944, 152_064, 28, 32_768], tied_embeddings: false, layer: Layer::Qwen2 },
    Known { name: "qwen2.5-72b", source: "Qwen/Qwen2.5-72B-Instruct",
        sizes: [8192, 64, 8, 128, 29_568, 152_064, 80, 32_768], tied_embeddings: false, layer: Layer::Qwen2 },
    Known { name: "qwen3-30b-a3b", source: "Qwen/Qwen3-30B-A3B",
        sizes: [2048, 32, 4, 128, 768, 151_936, 48, 40_960], tied_embeddings: false, layer: Layer::Qwen3Experts(128, 8) },
    Known { name: "mistral-7b", source: "mistralai/Mistral-7B-v0.1",
        sizes: [4096, 32, 8, 128, 14_336, 32_000, 32, 32_768], tied_embeddings: false, layer: Layer::Sliding(4096) },
    Known { name: "mixtral-8x7b", source: "mistralai/Mixtral-8x7B-v0.1",
        sizes: [4096, 32, 8, 128, 14_336, 32_000, 32, 32_768], tied_embeddings: false, layer: Layer::Experts(8, 2) },
    Known { name: "gemma-3-270m", source: "google/gemma-3-270m",
        sizes: [640, 4, 1, 256, 2048, 262_144, 18, 32_768], tied_embeddings: true, layer: Layer::Gemma3(512) },
];

/// All names, for messages.
#[must_use]
pub fn names() -> String {
    KNOWN.iter().map(|known| known.name).collect::<Vec<_>>().join(", ")
}

/// The repository whose `config.json` a known shape was taken from.
#[must_use]
pub fn source(name: &str) -> Option<&'static str> {
    find(name).map(|known| known.source)
}

/// The shape called `name`, in any case.
///
/// # Errors
/// [`CapacityError::Unknown`] with the known names.
pub fn shape(name: &str) -> Result<DecoderShape, CapacityError> {
    find(name).map(Known::shape).ok_or_else(|| CapacityError::Unknown {
        key: "model",
        value: name.to_owned(),
        known: names(),
    })
}

fn find(name: &str) -> Option<&'static Known> {
    KNOWN.iter().find(|known| known.name.eq_ignore_ascii_case(name))
}

impl Known {
    fn shape(&self) -> DecoderShape {
        let [hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size, layers, max_seq_len] =
            self.sizes;
        let mlp = match self.layer {
            Layer::Experts(num_experts, experts_per_token) | Layer::Qwen3Experts(num_experts, experts_per_token) => {
                Mlp::Experts { num_experts, experts_per_token, intermediate_size, shared_intermediate_size: 0 }
            }
            _ => Mlp::Dense { intermediate_size },
        };
        let norms = 2 * hidden_size;
        let small = match self.layer {
            Layer::Qwen2 => norms + (num_heads + 2 * num_kv_heads) * head_dim,
            Layer::Gemma3(_) => 2 * norms + 2 * head_dim,
            Layer::Qwen3Experts(..) => norms + 2 * head_dim,
            Layer::Llama | Layer::Sliding(_) | Layer::Experts(..) => norms,
        };
        let kind = |layer: usize| match self.layer {
            Layer::Sliding(window) => LayerKv::Window(window),
            Layer::Gemma3(window) if !(layer + 1).is_multiple_of(6) => LayerKv::Window(window),
            _ => LayerKv::Full,
        };
        DecoderShape {
            name: self.name.to_owned(),
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            mlp,
            vocab_size,
            max_seq_len,
            tied_embeddings: self.tied_embeddings,
            layers: (0..layers).map(kind).collect(),
            small_parameters_per_layer: small as u64,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Parameter counts as the publishers' safetensors indices state them.
    #[test]
    fn sums_are_the_published_parameter_counts() {
        let published: [(&str, u64); 15] = [
            ("llama-2-7b", 6_738_415_616),
            ("llama-2-13b", 13_015_864_320),
            ("llama-2-70b", 68_976_648_192),
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.1-70b", 70_553_706_496),
            ("llama-3.1-405b", 405_853_388_800),
            ("llama-3.2-1b", 1_235_814_400),
            ("smollm2-135m", 134_515_008),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-72b", 72_706_203_648),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("mistral-7b", 7_241_732_096),
            ("mixtral-8x7b", 46_702_792_704),
            ("gemma-3-270m", 268_098_176),
        ];
        assert_eq!(published.len(), KNOWN.len());
        for (name, parameters) in published {
            let shape = shape(name).unwrap();
            shape.check().unwrap();
            assert_eq!(shape.num_parameters(), parameters, "{name}");
            assert!(source(name).unwrap().contains('/'));
        }
    }

    #[test]
    fn an_unknown_name_gets_the_known_ones() {
        let error = shape("llama-9").unwrap_err().to_string();
        assert!(error.starts_with("model = llama-9: ") && error.contains("llama-2-70b"), "{error}");
        assert!(shape("Llama-2-70B").is_ok());
    }
}
