//! What a request asks of the sampler. Validated by the server; knows no logits.

/// How the next token is chosen. Order of application: logit_bias, repetition / presence / frequency
/// penalties, min_tokens mask, temperature, top_k, top_p, min_p, draw. Log-probabilities that are reported
/// are those of the raw logits, as the OpenAI API defines them.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 (or below 1e-5): greedy. Otherwise divides the logits.
    pub temperature: f32,
    /// Keep the `k` likeliest tokens; `None`: off.
    pub top_k: Option<u32>,
    /// Keep the smallest set of tokens whose probability reaches `p`; 1: off. In (0, 1].
    pub top_p: f32,
    /// Drop tokens less likely than `min_p` times the likeliest; 0: off. In [0, 1].
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; 1: off.
    pub repetition_penalty: f32,
    /// Subtracted once from tokens seen in the output; 0: off.
    pub presence_penalty: f32,
    /// Subtracted for each time a token was seen in the output; 0: off.
    pub frequency_penalty: f32,
    /// Added to logits. Ids `< vocab_size`; sorted by id, unique.
    pub logit_bias: Vec<(u32, f32)>,
    /// Same seed and prompt: same text, whatever else runs on this kind of device (another kind may draw the neighbour
    /// of a token where the random number lies within rounding of their boundary). Choice `i` of `n` draws from its own
    /// stream.
    pub seed: u64,
    /// Report log-probabilities with this many likeliest tokens beside the chosen one.
    pub logprobs: Option<u32>,
    /// The same for prompt tokens (echo).
    pub prompt_logprobs: Option<u32>,
    /// Tokens masked until `min_tokens` have been generated: the request's stop tokens.
    pub min_tokens: usize,
    /// See `min_tokens`; sorted.
    pub stop_token_ids: Vec<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
            prompt_logprobs: None,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
        }
    }
}

impl SamplingParams {
    /// Whether a choice depends on which tokens were generated before it.
    pub(crate) fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether a choice can be asked for before the tokens in front of it are known, and nothing but a token is to be
    /// told of it.
    pub(crate) fn chooses_unaware(&self) -> bool {
        !self.has_penalties() && self.logprobs.is_none()
    }
}
