//! Tensor names: transformers' on the left, GGUF's on the right, a table for each family. The rest of
//! the room speaks transformers' names; errors and devices see the name as spelled in the checkpoint.

use crate::config::Dialect;

/// Modules of one family; a tensor's name is the module's and `.weight` or `.bias`.
pub(crate) struct NameTable {
    /// After `model.layers.N.` and after `blk.N.`.
    pub layer: &'static [(&'static str, &'static str)],
}

/// Outside the layers, in every family.
const OUTER: &[(&str, &str)] =
    &[("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];

/// Llama, Mistral, Qwen2, Qwen3.
pub(crate) const LLAMA: NameTable = NameTable {
    layer: &[
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ],
};

/// Gemma 3: the same word means another norm.
pub(crate) const GEMMA3: NameTable = NameTable {
    layer: &[
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ],
};

/// How a checkpoint spells names.
#[derive(Clone, Copy)]
pub(crate) struct Spelling {
    /// Which column of the tables.
    pub dialect: Dialect,
    /// The family's table.
    pub table: &'static NameTable,
    /// Where the decoder stands in a Hugging Face checkpoint.
    root: Root,
}

/// What stands for `model.` in a Hugging Face checkpoint, and before `lm_head`.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Root {
    model: &'static str,
    head: &'static str,
}

/// Where Hugging Face checkpoints put the decoder: alone, or inside a vision model (old and new form).
const ROOTS: [Root; 3] = [
    Root { model: "model.", head: "" },
    Root { model: "language_model.model.", head: "language_model." },
    Root { model: "model.language_model.", head: "" },
];

impl Spelling {
    /// The spelling of a checkpoint that answers `has` for a tensor's name.
    pub(crate) fn find(dialect: Dialect, table: &'static NameTable, has: impl Fn(&str) -> bool) -> Self {
        let found = ROOTS.into_iter().find(|root| has(&format!("{}embed_tokens.weight", root.model)));
        Self { dialect, table, root: found.unwrap_or(ROOTS[0]) }
    }

    /// The checkpoint's name of `module.kind` outside the layers; `module` is transformers' name.
    pub(crate) fn outer(self, module: &str, kind: &str) -> String {
        match self.dialect {
            Dialect::HuggingFace => match module.strip_prefix("model.") {
                Some(inner) => format!("{}{inner}.{kind}", self.root.model),
                None => format!("{}{module}.{kind}", self.root.head),
            },
            Dialect::Gguf => format!("{}.{kind}", lookup(OUTER, module)),
        }
    }

    /// The checkpoint's name of `module.kind` in layer `layer_idx`.
    pub(crate) fn in_layer(self, layer_idx: usize, module: &str, kind: &str) -> String {
        match self.dialect {
            Dialect::HuggingFace => format!("{}layers.{layer_idx}.{module}.{kind}", self.root.model),
            Dialect::Gguf => format!("blk.{layer_idx}.{}.{kind}", lookup(self.table.layer, module)),
        }
    }

    /// The layer whose tensor this is; `None` for those outside the layers.
    pub(crate) fn layer_of(self, name: &str) -> Option<usize> {
        let rest = match self.dialect {
            Dialect::HuggingFace => name.strip_prefix(self.root.model)?.strip_prefix("layers.")?,
            Dialect::Gguf => name.strip_prefix("blk.")?,
        };
        rest.split('.').next()?.parse().ok()
    }

    /// Whether a tensor that no layer reads may be there all the same.
    pub(crate) fn is_harmless(self, name: &str, tied_embeddings: bool) -> bool {
        // Old exports store the rope frequencies, which the configuration determines; a tied head may be
        // stored a second time; vision towers are not needed for text.
        let is_tied_head = tied_embeddings && name == self.outer("lm_head", "weight");
        let module = name.strip_prefix("model.").unwrap_or(name);
        let is_vision = self.root != ROOTS[0]
            && (module.starts_with("vision_tower.") || module.starts_with("multi_modal_projector."));
        self.dialect == Dialect::HuggingFace && (is_tied_head || is_vision || name.ends_with(".rotary_emb.inv_freq"))
    }
}

/// The GGUF name, or the module's own where the table has none (so that a gap shows as a missing tensor).
fn lookup<'a>(table: &[(&str, &'a str)], module: &'a str) -> &'a str {
    table.iter().find(|(hf, _)| *hf == module).map_or(module, |(_, gguf)| *gguf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings() {
        let hf = Spelling::find(Dialect::HuggingFace, &LLAMA, |name| name == "model.embed_tokens.weight");
        assert_eq!(hf.outer("model.embed_tokens", "weight"), "model.embed_tokens.weight");
        assert_eq!(hf.outer("lm_head", "weight"), "lm_head.weight");
        assert_eq!(hf.in_layer(3, "self_attn.q_proj", "bias"), "model.layers.3.self_attn.q_proj.bias");
        assert_eq!(hf.layer_of("model.layers.12.mlp.up_proj.weight"), Some(12));
        assert_eq!(hf.layer_of("model.norm.weight"), None);
        let gguf = Spelling { dialect: Dialect::Gguf, ..hf };
        assert_eq!((gguf.layer_of("blk.7.ffn_up.weight"), gguf.layer_of("output.weight")), (Some(7), None));
        assert_eq!(gguf.outer("lm_head", "weight"), "output.weight");
        assert_eq!(gguf.in_layer(3, "post_attention_layernorm", "weight"), "blk.3.ffn_norm.weight");
        let gemma = Spelling { table: &GEMMA3, ..gguf };
        assert_eq!(gemma.in_layer(0, "post_attention_layernorm", "weight"), "blk.0.post_attention_norm.weight");
    }

    #[test]
    fn a_decoder_inside_a_vision_model() {
        for (root, head) in
            [("language_model.model.", "language_model.lm_head.weight"), ("model.language_model.", "lm_head.weight")]
        {
            let embedding = format!("{root}embed_tokens.weight");
            let hf = Spelling::find(Dialect::HuggingFace, &GEMMA3, |name| name == embedding);
            assert_eq!(hf.outer("model.norm", "weight"), format!("{root}norm.weight"));
            assert_eq!(hf.outer("lm_head", "weight"), head);
            assert!(hf.is_harmless("vision_tower.x.weight", true));
            assert!(hf.is_harmless("model.vision_tower.x.weight", true));
            assert!(!hf.is_harmless("vision_towers", true));
        }
    }

    #[test]
    fn harmless_tensors() {
        let hf = Spelling { dialect: Dialect::HuggingFace, table: &LLAMA, root: ROOTS[0] };
        assert!(hf.is_harmless("lm_head.weight", true));
        assert!(!hf.is_harmless("lm_head.weight", false));
        assert!(hf.is_harmless("model.layers.0.self_attn.rotary_emb.inv_freq", false));
        assert!(!hf.is_harmless("vision_tower.x", false));
        let gguf = Spelling { dialect: Dialect::Gguf, ..hf };
        assert!(!gguf.is_harmless("output.weight", true));
    }
}
