//! The body of a step: its plan, the requests that begin and end with it.

use super::FrameError;
use super::fields::{Reader, Writer};
use pagemill_engine::{RequestId, SamplingParams, SequenceId, StartedRequest, StepInput};
use pagemill_scheduler::{BlockCopy, BlockId, ScheduledSequence, StepPlan};
use std::sync::Arc;

/// Sequences, copies or requests in a step at most.
const MAX_ENTRIES: usize = 1 << 20;
/// Tokens of one sequence or prompt at most.
const MAX_TOKENS: usize = 1 << 22;
/// Cache groups of a model at most.
const MAX_GROUPS: usize = 64;
/// Blocks of one sequence at most.
const MAX_BLOCKS: usize = 1 << 20;
/// Choices of a request at most.
const MAX_CHOICES: usize = 1 << 12;
/// Entries of `logit_bias` and stop tokens at most.
const MAX_SAMPLING_ENTRIES: usize = 1 << 16;

/// Bytes that an entry of a list takes at least.
const SEQUENCE_ID_BYTES: usize = 12;
const COPY_BYTES: usize = 8;
const SEQUENCE_BYTES: usize = SEQUENCE_ID_BYTES + 4 + 1 + 8 + 4 + 4 + 1 + 8;
const STARTED_BYTES: usize = 8 + 4;
const REQUEST_ID_BYTES: usize = 8;
const BIAS_BYTES: usize = 8;

pub(super) fn write(step: &StepInput, writer: &mut Writer<'_>) -> Result<(), FrameError> {
    let StepInput { plan, started, ended, ended_sequences, after_idle } = step;
    // Ranks elsewhere pack each plan for itself.
    let StepPlan { step, block_copies, sequences, tables_since: _ } = plan;
    writer.u64(*step);
    writer.count("block_copies", block_copies.len(), MAX_ENTRIES)?;
    for copy in block_copies {
        writer.u32(copy.src.0);
        writer.u32(copy.dst.0);
    }
    writer.count("sequences", sequences.len(), MAX_ENTRIES)?;
    sequences.iter().try_for_each(|sequence| write_sequence(sequence, writer))?;
    writer.count("started", started.len(), MAX_ENTRIES)?;
    for request in started {
        writer.u64(request.id.0);
        writer.list_u32("prompt", request.prompt.iter().copied(), MAX_TOKENS)?;
        write_sampling(&request.sampling, writer)?;
    }
    writer.count("ended", ended.len(), MAX_ENTRIES)?;
    ended.iter().for_each(|id| writer.u64(id.0));
    writer.count("ended_sequences", ended_sequences.len(), MAX_ENTRIES)?;
    ended_sequences.iter().for_each(|id| write_sequence_id(*id, writer));
    writer.flag(*after_idle);
    Ok(())
}

pub(super) fn read(reader: &mut Reader<'_>) -> Result<StepInput, FrameError> {
    let step = reader.u64("step")?;
    let block_copies = reader.list("block_copies", MAX_ENTRIES, COPY_BYTES, |reader| {
        Ok(BlockCopy { src: BlockId(reader.u32("src")?), dst: BlockId(reader.u32("dst")?) })
    })?;
    let sequences = reader.list("sequences", MAX_ENTRIES, SEQUENCE_BYTES, read_sequence)?;
    let started = reader.list("started", MAX_ENTRIES, STARTED_BYTES, |reader| {
        Ok(StartedRequest {
            id: RequestId(reader.u64("started.id")?),
            prompt: reader.list_u32("prompt", MAX_TOKENS)?.into(),
            sampling: Arc::new(read_sampling(reader)?),
        })
    })?;
    let ended = reader.list("ended", MAX_ENTRIES, REQUEST_ID_BYTES, |reader| Ok(RequestId(reader.u64("ended")?)))?;
    let ended_sequences = reader.list("ended_sequences", MAX_ENTRIES, SEQUENCE_ID_BYTES, read_sequence_id)?;
    let after_idle = reader.flag("after_idle")?;
    let plan = StepPlan { step, block_copies, sequences, tables_since: Vec::new() };
    Ok(StepInput { plan, started, ended, ended_sequences, after_idle })
}

pub(super) fn write_sequence_id(id: SequenceId, writer: &mut Writer<'_>) {
    writer.u64(id.request.0);
    writer.u32(id.choice);
}

pub(super) fn read_sequence_id(reader: &mut Reader<'_>) -> Result<SequenceId, FrameError> {
    Ok(SequenceId { request: RequestId(reader.u64("request")?), choice: reader.u32("choice")? })
}

fn write_sequence(sequence: &ScheduledSequence, writer: &mut Writer<'_>) -> Result<(), FrameError> {
    let ScheduledSequence { id, token_ids, drawn_idx, start, block_tables, sample, prompt_logprobs, num_padding } =
        sequence;
    write_sequence_id(*id, writer);
    writer.list_u32("token_ids", token_ids.iter().copied(), MAX_TOKENS)?;
    writer.option_u32(*drawn_idx);
    writer.size(*start);
    writer.count("block_tables", block_tables.len(), MAX_GROUPS)?;
    for table in block_tables {
        writer.list_u32("block_table", table.iter().map(|block| block.0), MAX_BLOCKS)?;
    }
    writer.count("sample", sample.len(), MAX_CHOICES)?;
    sample.iter().for_each(|id| write_sequence_id(*id, writer));
    writer.flag(*prompt_logprobs);
    writer.size(*num_padding);
    Ok(())
}

fn read_sequence(reader: &mut Reader<'_>) -> Result<ScheduledSequence, FrameError> {
    Ok(ScheduledSequence {
        id: read_sequence_id(reader)?,
        token_ids: reader.list_u32("token_ids", MAX_TOKENS)?,
        drawn_idx: reader.option_u32("drawn_idx")?,
        start: reader.size("start")?,
        block_tables: reader.list("block_tables", MAX_GROUPS, 4, |reader| {
            Ok(reader.list_u32("block_table", MAX_BLOCKS)?.into_iter().map(BlockId).collect())
        })?,
        sample: reader.list("sample", MAX_CHOICES, SEQUENCE_ID_BYTES, read_sequence_id)?,
        prompt_logprobs: reader.flag("prompt_logprobs")?,
        num_padding: reader.size("num_padding")?,
    })
}

fn write_sampling(sampling: &SamplingParams, writer: &mut Writer<'_>) -> Result<(), FrameError> {
    let SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
        seed,
        logprobs,
        prompt_logprobs,
        min_tokens,
        stop_token_ids,
    } = sampling;
    writer.f32(*temperature);
    writer.option_u32(*top_k);
    for value in [top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty] {
        writer.f32(*value);
    }
    writer.count("logit_bias", logit_bias.len(), MAX_SAMPLING_ENTRIES)?;
    for (token, bias) in logit_bias {
        writer.u32(*token);
        writer.f32(*bias);
    }
    writer.u64(*seed);
    writer.option_u32(*logprobs);
    writer.option_u32(*prompt_logprobs);
    writer.size(*min_tokens);
    writer.list_u32("stop_token_ids", stop_token_ids.iter().copied(), MAX_SAMPLING_ENTRIES)
}

fn read_sampling(reader: &mut Reader<'_>) -> Result<SamplingParams, FrameError> {
    Ok(SamplingParams {
        temperature: reader.f32("temperature")?,
        top_k: reader.option_u32("top_k")?,
        top_p: reader.f32("top_p")?,
        min_p: reader.f32("min_p")?,
        repetition_penalty: reader.f32("repetition_penalty")?,
        presence_penalty: reader.f32("presence_penalty")?,
        frequency_penalty: reader.f32("frequency_penalty")?,
        logit_bias: reader.list("logit_bias", MAX_SAMPLING_ENTRIES, BIAS_BYTES, |reader| {
            Ok((reader.u32("logit_bias")?, reader.f32("logit_bias")?))
        })?,
        seed: reader.u64("seed")?,
        logprobs: reader.option_u32("logprobs")?,
        prompt_logprobs: reader.option_u32("prompt_logprobs")?,
        min_tokens: reader.size("min_tokens")?,
        stop_token_ids: reader.list_u32("stop_token_ids", MAX_SAMPLING_ENTRIES)?,
    })
}
