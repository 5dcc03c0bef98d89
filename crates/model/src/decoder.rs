//! The decoder around an architecture's layers: embedding, the layer loop, final norm, head, and this
//! stage's range of layers. Knows no architecture.

use crate::config::RawConfig;
use crate::holdings::{self, Holdings};
use crate::kv_groups;
use crate::layers::{LayerReader, ResidualStream, RmsNorm, StepContext, Vocabulary};
use crate::made_up;
use crate::names::{NameTable, Spelling};
use crate::weights::{Module, WeightReader};
use crate::{
    CausalLm, KvKind, LoadProgress, ModelError, ModelInput, ModelSpec, OutputRows, ParallelMode, RankContext, Stage,
};
use pagemill_backend::{BackendError, DType, KvPool, Tensor};
use pagemill_formats::Weights;

/// What an architecture file provides.
pub(crate) trait Architecture: Sized {
    /// One decoder layer.
    type Layer: DecoderLayer + 'static;
    /// How its family names tensors.
    const NAMES: &'static NameTable;

    /// Reads the configuration and refuses what is not computed.
    fn read(raw: &RawConfig) -> Result<Self, ModelError>;

    /// Shapes and constants.
    fn spec(&self) -> &DecoderSpec;

    /// Loads one layer.
    fn load_layer(&self, layer: &LayerReader<'_>) -> Result<Self::Layer, ModelError>;
}

/// A loaded layer.
pub(crate) trait DecoderLayer: Send + Sync {
    /// Writes K and V of all tokens to the cache; gives their queries `[T, H * E]`, as attention takes them.
    fn write_kv(&self, cx: &mut StepContext<'_>, stream: &mut ResidualStream<'_>) -> Result<Tensor, ModelError>;

    /// Attention of the queries, and everything behind it: adds the layer's contributions to the stream of the same
    /// rows.
    fn attend<'m>(&'m self, cx: &StepContext<'_>, q: Tensor, stream: &mut ResidualStream<'m>)
    -> Result<(), ModelError>;

    /// Adds the layer's contributions to the stream.
    fn forward<'m>(&'m self, cx: &mut StepContext<'_>, stream: &mut ResidualStream<'m>) -> Result<(), ModelError> {
        let q = self.write_kv(cx, stream)?;
        self.attend(cx, q, stream)
    }

    /// The same for the last tokens of `seqs` alone, but for K and V: leaves the stream with their rows.
    fn forward_last_of<'m>(
        &'m self,
        cx: &mut StepContext<'_>,
        seqs: &[u32],
        stream: &mut ResidualStream<'m>,
    ) -> Result<(), ModelError> {
        let all = self.write_kv(cx, stream)?;
        if seqs.is_empty() {
            return stream.keep_rows(cx, &[]);
        }
        let (rank, layout) = (cx.rank, &cx.batch.layout);
        let rows = layout.last_rows(seqs)?;
        // Queued behind all that reads the step's own batch, whose place on the device it may take.
        let batch = rank.backend.upload_batch(layout.last_tokens(seqs)?, cx.kv.spec())?;
        let mut q = rank.backend.activation(rows.len(), all.cols())?; // [R, H * E]
        rank.backend.gather_rows(&all, &rows, &mut q)?;
        drop(all);
        stream.keep_rows(cx, &rows)?;
        self.attend(&StepContext { rank, batch: &batch, kv: &mut *cx.kv }, q, stream)
    }
}

/// Shapes and constants of a decoder, as its configuration states them.
#[derive(Clone, Debug)]
pub(crate) struct DecoderSpec {
    /// `D`.
    pub hidden_size: usize,
    /// `H`, over all ranks.
    pub num_heads: usize,
    /// `K`, over all ranks.
    pub num_kv_heads: usize,
    /// `E`.
    pub head_dim: usize,
    /// `F`, over all ranks.
    pub intermediate_size: usize,
    /// `V`.
    pub vocab_size: usize,
    /// Positions that the model was made for.
    pub max_seq_len: usize,
    /// Whether the head is the embedding.
    pub tied_embeddings: bool,
    /// Inside the norms' root.
    pub norm_eps: f32,
    /// Added to every norm weight as stored.
    pub norm_offset: f32,
    /// Multiplies the embeddings.
    pub embedding_scale: f32,
    /// Caps the logits by `cap * tanh(x / cap)`.
    pub final_soft_cap: Option<f32>,
    /// What each layer keeps.
    pub layer_kinds: Vec<KvKind>,
}

impl DecoderSpec {
    /// Refuses sizes that make no sense, whichever architecture stated them.
    fn check(&self, raw: &RawConfig) -> Result<(), ModelError> {
        for (field, size) in [
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate_size),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_seq_len),
        ] {
            raw.check_size(field, size)?;
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let detail = format!("{} does not divide {} query heads", self.num_kv_heads, self.num_heads);
            return Err(raw.bad("num_key_value_heads", &detail));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps > 0.0) {
            return Err(raw.bad("rms_norm_eps", &format!("{} must be above 0", self.norm_eps)));
        }
        match self.final_soft_cap {
            Some(cap) if !(cap.is_finite() && cap > 0.0) => {
                Err(raw.bad("final_logit_softcapping", &format!("{cap} must be above 0")))
            }
            _ => Ok(()),
        }
    }

    fn model_spec(&self, raw: &RawConfig, weights: &Weights) -> ModelSpec {
        let elements = |shape: &[usize]| shape.iter().fold(1u64, |n, dim| n.saturating_mul(*dim as u64));
        let stored = weights.tensors();
        let (num_parameters, stored_bytes) = match weights.made_up_type() {
            Some(made_up) => {
                let num_parameters = made_up::num_parameters(self);
                let (elems, bytes) = (made_up.block_elems(), made_up.block_bytes());
                (num_parameters, (num_parameters / u64::from(elems)).saturating_mul(u64::from(bytes)))
            }
            None => (
                stored.iter().fold(0, |n, info| elements(info.shape()).saturating_add(n)),
                stored.iter().fold(0, |n, info| info.num_bytes().saturating_add(n)),
            ),
        };
        ModelSpec {
            architecture: raw.architecture().into(),
            num_layers: self.layer_kinds.len(),
            hidden_size: self.hidden_size,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            intermediate_size: self.intermediate_size,
            vocab_size: self.vocab_size,
            max_seq_len: self.max_seq_len,
            tied_embeddings: self.tied_embeddings,
            kv_groups: kv_groups::group_layers(&self.layer_kinds),
            num_parameters,
            stored_bytes,
        }
    }
}

/// Reads shapes and limits.
pub(crate) fn read_spec<A: Architecture>(raw: &RawConfig, weights: &Weights) -> Result<ModelSpec, ModelError> {
    let architecture = read::<A>(raw)?;
    Ok(architecture.spec().model_spec(raw, weights))
}

fn read<A: Architecture>(raw: &RawConfig) -> Result<A, ModelError> {
    let architecture = A::read(raw)?;
    architecture.spec().check(raw)?;
    Ok(architecture)
}

fn spelling<A: Architecture>(raw: &RawConfig, weights: &Weights) -> Spelling {
    Spelling::find(raw.dialect(), A::NAMES, |name| weights.get(name).is_some())
}

/// Which layers each stage of `mode` holds; refuses what the model does not allow.
pub(crate) fn plan_stages<A: Architecture>(
    raw: &RawConfig,
    weights: &Weights,
    mode: ParallelMode,
    byte_cost: &dyn Fn(DType) -> u64,
) -> Result<Vec<Stage>, ModelError> {
    let architecture = read::<A>(raw)?;
    holdings::plan_stages(architecture.spec(), weights, spelling::<A>(raw, weights), mode, byte_cost)
}

/// Loads this rank's share of the weights of `stage`.
pub(crate) fn load<A: Architecture>(
    raw: &RawConfig,
    weights: &Weights,
    cx: &RankContext,
    stage: &Stage,
    progress: &dyn Fn(LoadProgress),
) -> Result<Box<dyn CausalLm>, ModelError> {
    let architecture = read::<A>(raw)?;
    let spec = architecture.spec();
    let model_spec = spec.model_spec(raw, weights);
    let holdings = Holdings { stage, num_layers: model_spec.num_layers, tied_embeddings: spec.tied_embeddings };
    let reader = WeightReader::new(weights, raw.path(), cx, spelling::<A>(raw, weights), holdings, progress);
    let vocabulary = Vocabulary::load(&reader, spec, holdings)?;
    let places = kv_groups::places(&model_spec.kv_groups, stage.layers.clone());
    let layers = stage
        .layers
        .clone()
        .zip(places)
        .map(|(layer_idx, place)| architecture.load_layer(&LayerReader { weights: &reader, spec, layer_idx, place }))
        .collect::<Result<Vec<_>, _>>()?;
    let final_norm =
        stage.is_last().then(|| RmsNorm::load_outer(&reader, spec, Module::Outer("model.norm"))).transpose()?;
    reader.finish()?;
    Ok(Box::new(Decoder {
        cx: cx.clone(),
        weight_bytes: reader.bytes_on_device(),
        vocabulary,
        layers,
        final_norm,
        stage: stage.clone(),
        spec: model_spec,
    }))
}

/// A stage of a decoder of layers `L`.
struct Decoder<L> {
    cx: RankContext,
    spec: ModelSpec,
    stage: Stage,
    vocabulary: Vocabulary,
    layers: Vec<L>,
    /// On the last stage.
    final_norm: Option<RmsNorm>,
    weight_bytes: u64,
}

impl<L: DecoderLayer> Decoder<L> {
    fn run_layers(&self, hidden: Tensor, input: &ModelInput<'_>, kv: &mut KvPool) -> Result<Tensor, ModelError> {
        let mut stream = ResidualStream::new(hidden);
        let mut cx = StepContext { rank: &self.cx, batch: input.batch, kv };
        let Some((last, before)) = self.layers.split_last() else { return stream.finish(&cx) };
        before.iter().try_for_each(|layer| layer.forward(&mut cx, &mut stream))?;
        match input.output {
            OutputRows::LastOf(seqs) if self.stage.is_last() => last.forward_last_of(&mut cx, seqs, &mut stream)?,
            _ => last.forward(&mut cx, &mut stream)?,
        }
        stream.finish(&cx)
    }
}

impl<L: DecoderLayer> CausalLm for Decoder<L> {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn stage(&self) -> &Stage {
        &self.stage
    }

    fn forward(&self, input: &ModelInput<'_>, kv: &mut KvPool) -> Result<Tensor, ModelError> {
        self.run_layers(self.vocabulary.embed(&self.cx, input.token_ids)?, input, kv)
    }

    fn forward_from(&self, hidden: Tensor, input: &ModelInput<'_>, kv: &mut KvPool) -> Result<Tensor, ModelError> {
        let (rows, cols) = (input.token_ids.len(), self.spec.hidden_size);
        if (hidden.rows(), hidden.cols()) != (rows, cols) {
            let (expected, got) = (format!("[{rows}, {cols}]"), format!("[{}, {}]", hidden.rows(), hidden.cols()));
            return Err(BackendError::Shape { op: "forward_from", expected, got }.into());
        }
        self.run_layers(hidden, input, kv)
    }

    fn logits(&self, hidden: &Tensor, rows: &[u32]) -> Result<Tensor, ModelError> {
        let backend = self.cx.backend.as_ref();
        let final_norm = self.final_norm.as_ref().ok_or_else(|| BackendError::Shape {
            op: "logits",
            expected: "the last stage".into(),
            got: format!("stage {} of {}", self.stage.index, self.stage.count),
        })?;
        let are_all = rows.len() == hidden.rows() && (0..).zip(rows).all(|(at, &row)| row == at);
        if are_all {
            return self.vocabulary.logits(&self.cx, final_norm.of(hidden)); // [R, V]
        }
        let mut wanted = backend.temp(rows.len(), hidden.cols())?; // [R, D]
        backend.gather_rows(hidden, rows, &mut wanted)?;
        self.vocabulary.logits(&self.cx, final_norm.of(&wanted)) // [R, V]
    }

    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }
}
