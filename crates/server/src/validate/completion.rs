//! What is particular to `/v1/completions`.

use super::sampling::{self, EndpointFields};
use super::{LogprobsRequest, ModelFacts, PromptSource, ValidRequest, token_ids};
use crate::config::Limits;
use crate::error::ApiError;
use crate::wire::Prompt;
use crate::wire::completion::CompletionRequest;

/// The OpenAI API's default.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Judges a completion request.
///
/// # Errors
/// 400 naming the field.
pub(crate) fn validate(
    mut request: CompletionRequest,
    facts: &ModelFacts,
    limits: &Limits,
) -> Result<ValidRequest, ApiError> {
    if request.suffix.as_deref().is_some_and(|s| !s.is_empty()) {
        return Err(ApiError::unsupported("suffix"));
    }
    if request.best_of.is_some_and(|best_of| best_of != request.n.unwrap_or(1)) {
        return Err(ApiError::bad_field("best_of", "'best_of' is only supported when it equals 'n'.")
            .with_code("unsupported_parameter"));
    }
    super::chat::check_response_format(request.response_format.as_ref())?;
    let logprobs = request
        .logprobs
        .map(|top| sampling::integer("logprobs", top, 0, u64::from(limits.completion_logprobs)))
        .transpose()?
        .map(|top| LogprobsRequest { top: u32::try_from(top).unwrap_or(u32::MAX) });
    let max_tokens = sampling::max_tokens("max_tokens", request.max_tokens, 0)?.unwrap_or(DEFAULT_MAX_TOKENS);
    let endpoint = EndpointFields { max_tokens: Some(max_tokens), logprobs, echo: request.echo.unwrap_or(false) };
    let options = sampling::validate(request.take_sampling(), endpoint, facts, limits)?;
    let add_special_tokens = request.add_special_tokens.unwrap_or(true);
    let prompt = prompt(request.prompt, add_special_tokens, facts)?;
    check_total(&prompt, options.n, limits)?;
    Ok(ValidRequest { prompt, options })
}

fn prompt(sent: Prompt, add_special_tokens: bool, facts: &ModelFacts) -> Result<PromptSource, ApiError> {
    match sent {
        Prompt::Texts(texts) if texts.is_empty() => {
            Err(ApiError::bad_field("prompt", "'prompt' must hold at least one prompt."))
        }
        Prompt::Texts(texts) => Ok(PromptSource::Texts { texts, add_special_tokens }),
        Prompt::Ids(lists) => lists
            .iter()
            .map(|ids| token_ids(ids, facts.vocab_size, "prompt"))
            .collect::<Result<_, _>>()
            .map(PromptSource::Ids),
    }
}

fn check_total(prompt: &PromptSource, n: u32, limits: &Limits) -> Result<(), ApiError> {
    let num_prompts = match prompt {
        PromptSource::Chat(_) => 1,
        PromptSource::Texts { texts, .. } => texts.len(),
        PromptSource::Ids(lists) => lists.len(),
    };
    if num_prompts.saturating_mul(n as usize) > limits.total_choices {
        return Err(ApiError::bad_field(
            "prompt",
            format!("{num_prompts} prompts × n = {n} exceed {} choices in one call.", limits.total_choices),
        ));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{Delivery, test_facts};
    use super::*;
    use crate::body::parse;

    fn judge(json: &str) -> Result<ValidRequest, ApiError> {
        validate(parse(json.as_bytes(), 64)?, &test_facts(), &Limits::default())
    }

    fn refused_param(json: &str) -> String {
        let error = judge(json).unwrap_err();
        assert_eq!(error.status(), 400, "{json}");
        error.param().unwrap_or("").to_owned()
    }

    #[test]
    fn d16_token_ids_outside_the_vocabulary_are_refused() {
        for prompt in ["[-1]", "[[-1]]", "[512]", "[[1],[512]]", "[9223372036854775807]", "[18446744073709551615]"] {
            assert_eq!(refused_param(&format!(r#"{{"prompt":{prompt}}}"#)), "prompt");
        }
        assert!(matches!(judge(r#"{"prompt":[0,511]}"#).unwrap().prompt, PromptSource::Ids(l) if l == [[0, 511]]));
    }

    #[test]
    fn d12_seeds_beyond_i64_are_refused() {
        for seed in ["18446744073709551616", "9223372036854775808", "-9223372036854775809", "1.5", "\"1\""] {
            assert_eq!(refused_param(&format!(r#"{{"prompt":"a","seed":{seed}}}"#)), "seed");
        }
    }

    #[test]
    fn d08_logprobs_beyond_the_limit_are_refused() {
        for logprobs in ["6", "1000000", "-1"] {
            assert_eq!(refused_param(&format!(r#"{{"prompt":"a","logprobs":{logprobs}}}"#)), "logprobs");
        }
        let options = judge(r#"{"prompt":"a","logprobs":5,"echo":true}"#).unwrap().options;
        assert_eq!((options.sampling.logprobs, options.sampling.prompt_logprobs), (Some(5), Some(5)));
    }

    #[test]
    fn d18_zero_tokens_are_accepted() {
        assert_eq!(judge(r#"{"prompt":"a","max_tokens":0,"echo":true}"#).unwrap().options.max_tokens, Some(0));
        assert_eq!(judge(r#"{"prompt":"a"}"#).unwrap().options.max_tokens, Some(16));
        assert_eq!(refused_param(r#"{"prompt":"a","max_tokens":-1}"#), "max_tokens");
    }

    #[test]
    fn unsupported_and_unknown_fields_are_named() {
        assert_eq!(refused_param(r#"{"prompt":"a","suffix":"b"}"#), "suffix");
        assert_eq!(refused_param(r#"{"prompt":"a","best_of":3}"#), "best_of");
        assert_eq!(refused_param(r#"{"prompt":"a","no_such_field":1}"#), "no_such_field");
        assert_eq!(refused_param(r#"{"max_tokens":1}"#), "prompt");
        assert_eq!(refused_param(r#"{"prompt":[]}"#), "prompt");
        assert!(judge(r#"{"prompt":"a","best_of":2,"n":2,"suffix":null,"user":"u","stream":true}"#).is_ok());
    }

    #[test]
    fn too_many_choices_in_all_are_refused() {
        let prompts = ["\"a\""; 9].join(",");
        assert_eq!(refused_param(&format!(r#"{{"prompt":[{prompts}],"n":128}}"#)), "prompt");
        let options = judge(r#"{"prompt":"a","stream":true}"#).unwrap().options;
        assert_eq!(options.delivery, Delivery::Stream { include_usage: false });
    }
}
