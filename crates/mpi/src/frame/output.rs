//! The body of a step's output: tokens, their log-probabilities, and those of prompts.

use super::FrameError;
use super::fields::{Reader, Writer};
use super::step::{read_sequence_id, write_sequence_id};
use pagemill_engine::TokenLogprobs;
use pagemill_scheduler::{SampledToken, StepOutput};

/// Tokens sampled, or prompts told about, in a step at most.
const MAX_ENTRIES: usize = 1 << 20;
/// Positions of a prompt in a step at most.
const MAX_POSITIONS: usize = 1 << 22;
/// Likeliest tokens at a position at most.
const MAX_TOP: usize = 1 << 16;
/// Bytes of the reason why a sequence cannot go on, at most; longer ones are cut.
const MAX_REASON_BYTES: usize = 4096;

/// Bytes that an entry of a list takes at least.
const SAMPLED_BYTES: usize = 12 + 1 + 4 + 1;
const LOGPROBS_BYTES: usize = 4 + 4 + 4;
const PROMPT_BYTES: usize = 12 + 8 + 4;
const TOP_BYTES: usize = 8;

pub(super) fn write(output: &StepOutput, writer: &mut Writer<'_>) -> Result<(), FrameError> {
    let StepOutput { step, sampled, prompt_logprobs } = output;
    writer.u64(*step);
    writer.count("sampled", sampled.len(), MAX_ENTRIES)?;
    for SampledToken { id, token, logprobs } in sampled {
        write_sequence_id(*id, writer);
        writer.flag(token.is_ok());
        match token {
            Ok(token) => writer.u32(*token),
            Err(reason) => {
                let end = reason.floor_char_boundary(MAX_REASON_BYTES);
                writer.text("token", &reason[..end], MAX_REASON_BYTES)?;
            }
        }
        writer.flag(logprobs.is_some());
        logprobs.iter().try_for_each(|logprobs| write_logprobs(logprobs, writer))?;
    }
    writer.count("prompt_logprobs", prompt_logprobs.len(), MAX_ENTRIES)?;
    for (id, position, entries) in prompt_logprobs {
        write_sequence_id(*id, writer);
        writer.size(*position);
        writer.count("positions", entries.len(), MAX_POSITIONS)?;
        entries.iter().try_for_each(|logprobs| write_logprobs(logprobs, writer))?;
    }
    Ok(())
}

pub(super) fn read(reader: &mut Reader<'_>) -> Result<StepOutput, FrameError> {
    Ok(StepOutput {
        step: reader.u64("step")?,
        sampled: reader.list("sampled", MAX_ENTRIES, SAMPLED_BYTES, |reader| {
            Ok(SampledToken {
                id: read_sequence_id(reader)?,
                token: match reader.flag("token")? {
                    true => Ok(reader.u32("token")?),
                    false => Err(reader.text("token", MAX_REASON_BYTES)?),
                },
                logprobs: reader.flag("logprobs")?.then(|| read_logprobs(reader)).transpose()?,
            })
        })?,
        prompt_logprobs: reader.list("prompt_logprobs", MAX_ENTRIES, PROMPT_BYTES, |reader| {
            let id = read_sequence_id(reader)?;
            let position = reader.size("position")?;
            Ok((id, position, reader.list("positions", MAX_POSITIONS, LOGPROBS_BYTES, read_logprobs)?))
        })?,
    })
}

fn write_logprobs(logprobs: &TokenLogprobs, writer: &mut Writer<'_>) -> Result<(), FrameError> {
    writer.f32(logprobs.logprob);
    writer.u32(logprobs.rank);
    writer.count("top", logprobs.top.len(), MAX_TOP)?;
    for (token, logprob) in &logprobs.top {
        writer.u32(*token);
        writer.f32(*logprob);
    }
    Ok(())
}

fn read_logprobs(reader: &mut Reader<'_>) -> Result<TokenLogprobs, FrameError> {
    Ok(TokenLogprobs {
        logprob: reader.f32("logprob")?,
        rank: reader.u32("rank")?,
        top: reader.list("top", MAX_TOP, TOP_BYTES, |reader| Ok((reader.u32("top")?, reader.f32("top")?)))?,
    })
}
