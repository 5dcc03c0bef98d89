//! A model's matrices on the device, found in the checkpoint by their names in either spelling. Only what
//! the ops of a forward multiply with; norms and biases do not matter for time. Made up where there is no checkpoint.

use crate::commands::bench::workload::Random;
use anyhow::{Context, Result, anyhow};
use pagemill_backend::{Backend, DType, Weight, WeightDesc};
use pagemill_formats::{Checkpoint, Weights};
use pagemill_model::ModelSpec;

/// The matrices of one layer.
pub struct LayerWeights {
    /// q, k, v.
    pub qkv: [Weight; 3],
    /// The attention's output.
    pub output: Weight,
    /// gate, up.
    pub gate_up: [Weight; 2],
    /// down.
    pub down: Weight,
}

/// All matrices of a model.
pub struct ModelWeights {
    /// In order.
    pub layers: Vec<LayerWeights>,
    /// `[V, D]`.
    pub embedding: Weight,
    head: Option<Weight>,
}

/// A module's name in GGUF and in Hugging Face checkpoints.
type Names = (&'static str, &'static str);

const QKV: [Names; 3] =
    [("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj")];
const OUTPUT: Names = ("attn_output", "self_attn.o_proj");
const GATE_UP: [Names; 2] = [("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj")];
const DOWN: Names = ("ffn_down", "mlp.down_proj");
const EMBEDDING: Names = ("token_embd", "embed_tokens");
const HEAD: Names = ("output", "lm_head");

/// Which layers' matrices are wanted.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// Of the model.
    pub spec: &'a ModelSpec,
    /// How many layers; more than the model has are its own again, at other places.
    pub num_layers: usize,
}

impl ModelWeights {
    /// Reads them, or makes them up where there is a configuration alone.
    ///
    /// # Errors
    /// The matrix that is not there, or cannot be read or taken.
    pub fn load(checkpoint: &Checkpoint, wanted: Wanted<'_>, backend: &dyn Backend) -> Result<Self> {
        let (spec, weights) = (wanted.spec, checkpoint.weights());
        let made_up = match weights.made_up_type() {
            Some(stored) => {
                let dtype = dtype_named(stored.name(), "made-up weights")?;
                Some((dtype, made_up(dtype)))
            }
            None => None,
        };
        let reader = Reader { weights, backend, made_up };
        let layers =
            (0..wanted.num_layers).map(|at| reader.layer(at % spec.num_layers, spec)).collect::<Result<_>>()?;
        let shape = [spec.vocab_size, spec.hidden_size];
        let head = if spec.tied_embeddings { None } else { Some(reader.outer(HEAD, shape)?) };
        Ok(Self { layers, embedding: reader.outer(EMBEDDING, shape)?, head })
    }

    /// Bytes of the smallest product of a layer, about: the attention's output.
    pub fn smallest_product_bytes(spec: &ModelSpec) -> usize {
        let elems = (spec.hidden_size * spec.num_heads * spec.head_dim) as u64;
        let bytes = elems.saturating_mul(spec.stored_bytes) / spec.num_parameters.max(1);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// The final projection `[V, D]`.
    pub fn head(&self) -> &Weight {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// Bytes that a decode step reads: all matrices, the embedding only where it is the head.
    pub fn len_bytes(&self) -> usize {
        self.layers.iter().flat_map(LayerWeights::all).map(Weight::len_bytes).sum::<usize>() + self.head().len_bytes()
    }
}

impl LayerWeights {
    fn all(&self) -> impl Iterator<Item = &Weight> {
        self.qkv.iter().chain([&self.output, &self.down]).chain(&self.gate_up)
    }
}

/// Bytes of made-up blocks of `dtype`, to be repeated: normal numbers of a small deviation where it is f32 or bf16;
/// elsewhere any bits of which no part reads as an f16 that is not finite.
pub fn made_up(dtype: DType) -> Vec<u8> {
    let scaled = || normal_numbers(11).into_iter().map(|number| number * DEVIATION);
    match dtype {
        DType::F32 => scaled().flat_map(f32::to_le_bytes).collect(),
        // The upper half of an f32.
        DType::BF16 => scaled().flat_map(|x| [x.to_le_bytes()[2], x.to_le_bytes()[3]]).collect(),
        _ => {
            let mut random = Random::new(11);
            let bits = |_| random.next_u64().to_le_bytes()[0] & FINITE_BITS;
            (0..MADE_UP_BLOCKS * dtype.block_bytes()).map(bits).collect()
        }
    }
}

/// Normal numbers of deviation 1, to be repeated.
pub fn normal_numbers(seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    #[allow(clippy::cast_possible_truncation)] // a sample
    let mut next = |_| random.normal() as f32;
    (0..NUMBERS).map(&mut next).collect()
}

/// Odd, as is the number of blocks, so that rows do not line up.
const NUMBERS: usize = (1 << 20) - 3;
const MADE_UP_BLOCKS: usize = (1 << 16) - 1;
/// Of the weights.
const DEVIATION: f32 = 0.02;
/// Leaves the exponents of f16 below their largest.
const FINITE_BITS: u8 = 0x3F;

fn dtype_named(name: &str, what: &str) -> Result<DType> {
    let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name);
    dtype.ok_or_else(|| anyhow!("{what}: no kernel for {name}"))
}

struct Reader<'a> {
    weights: &'a Weights,
    backend: &'a dyn Backend,
    /// Where there are no weights.
    made_up: Option<(DType, Vec<u8>)>,
}

impl Reader<'_> {
    fn layer(&self, layer: usize, spec: &ModelSpec) -> Result<LayerWeights> {
        let (hidden, inner) = (spec.hidden_size, spec.intermediate_size);
        let (q, kv) = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
        let [q_names, k_names, v_names] = QKV;
        let [gate, up] = GATE_UP;
        Ok(LayerWeights {
            qkv: [
                self.in_layer(layer, q_names, [q, hidden])?,
                self.in_layer(layer, k_names, [kv, hidden])?,
                self.in_layer(layer, v_names, [kv, hidden])?,
            ],
            output: self.in_layer(layer, OUTPUT, [hidden, q])?,
            gate_up: [self.in_layer(layer, gate, [inner, hidden])?, self.in_layer(layer, up, [inner, hidden])?],
            down: self.in_layer(layer, DOWN, [hidden, inner])?,
        })
    }

    fn in_layer(&self, layer: usize, (gguf, hf): Names, shape: [usize; 2]) -> Result<Weight> {
        self.matrix(&[format!("blk.{layer}.{gguf}.weight"), format!("layers.{layer}.{hf}.weight")], shape)
    }

    fn outer(&self, (gguf, hf): Names, shape: [usize; 2]) -> Result<Weight> {
        self.matrix(&[format!("{gguf}.weight"), format!("{hf}.weight")], shape)
    }

    /// The matrix of one of these names, with or without something in front of the name (a decoder inside a
    /// larger model); the shape tells it from another tower's.
    fn matrix(&self, names: &[String; 2], shape: [usize; 2]) -> Result<Weight> {
        if let Some((dtype, supply)) = &self.made_up {
            let desc = WeightDesc { name: names[1].clone(), dtype: *dtype, rows: shape[0], cols: shape[1] };
            return Ok(self.backend.load_repeated(desc, supply)?);
        }
        let is_named = |name: &str, wanted: &str| {
            name.strip_suffix(wanted).is_some_and(|front| front.is_empty() || front.ends_with('.'))
        };
        let found = self
            .weights
            .tensors()
            .iter()
            .find(|tensor| tensor.shape() == shape && names.iter().any(|wanted| is_named(tensor.name(), wanted)));
        let tensor = found.with_context(|| format!("no tensor {} or {} of shape {shape:?}", names[0], names[1]))?;
        let (_, stored) = self.weights.loadable(tensor.name())?;
        let dtype = dtype_named(stored.name(), tensor.name())?;
        let desc = WeightDesc { name: tensor.name().to_owned(), dtype, rows: shape[0], cols: shape[1] };
        let weight = self.backend.load_weight(desc, &mut |first, rows, bytes| {
            self.weights.read_rows(tensor.name(), first, rows, bytes).map_err(Into::into)
        })?;
        Ok(weight)
    }
}
