//! A plan as text for people: every number with its unit, and what of it was measured. Decides no number.

use crate::CapacityPlan;
use crate::memory::{Bytes, RankMemory};
use crate::pipeline::DecodeStep;
use crate::plan::Row;
use std::fmt::{Display, Formatter, Result};

/// Digits in threes.
struct Grouped(u64);

impl Display for Grouped {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let digits = self.0.to_string();
        let mut text = String::new();
        for (i, digit) in digits.chars().enumerate() {
            if i > 0 && (digits.len() - i).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        f.pad(&text)
    }
}

/// Seconds in the unit that reads best.
struct Time(f64);

impl Display for Time {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let text = match self.0 {
            s if s >= 1.0 => format!("{s:.2} s"),
            s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
            s => format!("{:.1} µs", s * 1e6),
        };
        f.pad(&text)
    }
}

impl Display for CapacityPlan {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        self.head(f)?;
        self.memory(f)?;
        self.communication(f)?;
        self.times(f)?;
        self.micro_batches(f)?;
        self.wish(f)?;
        self.basis(f)
    }
}

impl CapacityPlan {
    fn head(&self, f: &mut Formatter<'_>) -> Result {
        let (layout, parameters) = (&self.layout, Grouped(self.parameters));
        writeln!(
            f,
            "{}: {parameters} parameters, weights {} ({:.2} bits each), KV {}",
            self.model,
            self.weights.name,
            self.weights.bits(),
            self.kv_dtype.name()
        )?;
        writeln!(
            f,
            "{} × {} of {}: tensor parallel {} × pipeline parallel {}, {} a host",
            layout.ranks(),
            self.device.name,
            Bytes(self.device.memory_bytes),
            layout.tp,
            layout.pp,
            layout.ranks_per_host
        )
    }

    fn memory(&self, f: &mut Formatter<'_>) -> Result {
        let which = if self.ranks_differ { "the first rank of a stage, which has most" } else { "a rank" };
        writeln!(f, "\nmemory of {which}")?;
        // Stages in between are alike: the first two and the last are shown.
        let mut shown: Vec<&RankMemory> = self.ranks.iter().take(2).collect();
        if self.ranks.len() > 2 {
            shown.extend(self.ranks.last());
        }
        let line = |f: &mut Formatter<'_>, name: &str, cell: &dyn Fn(&RankMemory) -> String| {
            write!(f, "  {name:<18}")?;
            for rank in &shown {
                write!(f, "{:>14}", cell(rank))?;
            }
            writeln!(f)
        };
        let bytes = |bytes: u64| Bytes(bytes).to_string();
        line(f, "stage", &|rank| rank.stage.to_string())?;
        line(f, "layers", &|rank| format!("{}..{}", rank.layers_start, rank.layers_end))?;
        line(f, "embedding", &|rank| bytes(rank.embedding_bytes))?;
        line(f, "attention", &|rank| bytes(rank.attention_bytes))?;
        line(f, "mlp", &|rank| bytes(rank.mlp_bytes))?;
        line(f, "norms, biases", &|rank| bytes(rank.norm_bytes))?;
        line(f, "head", &|rank| bytes(rank.head_bytes))?;
        line(f, "= weights", &|rank| bytes(rank.weight_bytes))?;
        line(f, "workspace", &|rank| bytes(rank.workspace_bytes))?;
        line(f, "reserve", &|rank| bytes(rank.reserve_bytes))?;
        line(f, "KV pool", &|rank| bytes(rank.kv_pool_bytes))?;
        line(f, "KV of a token", &|rank| bytes(rank.kv_bytes_per_token))?;
        line(f, "KV of a sequence", &|rank| bytes(self.kv_sequence_bytes[rank.stage]))?;
        writeln!(
            f,
            "fits {} sequences of {} tokens, or {} of {} in + {} out; a step has at most {} sequences and {} tokens",
            Grouped(self.full_length_sequences),
            self.max_seq_len,
            Grouped(self.request_sequences),
            self.prompt_tokens,
            self.gen_tokens,
            self.limits.max_batch_size,
            self.limits.max_batch_tokens
        )
    }

    fn communication(&self, f: &mut Formatter<'_>) -> Result {
        let traffic = &self.traffic;
        if self.layout.ranks() == 1 {
            return writeln!(f, "\ncommunication: none, there is one rank");
        }
        writeln!(f, "\ncommunication of a token")?;
        if self.layout.tp > 1 {
            writeln!(
                f,
                "  all-reduce  {} × {}, {} through each rank's link, {}; a stage is on {} host{}",
                traffic.all_reduces,
                Bytes(traffic.all_reduce_bytes),
                Bytes(traffic.all_reduce_wire_bytes),
                Time(traffic.all_reduce_s),
                traffic.hosts_per_stage,
                if traffic.hosts_per_stage > 1 { "s" } else { "" }
            )?;
            let gathered = (Bytes(traffic.all_gather_bytes), Time(traffic.all_gather_s));
            writeln!(f, "  all-gather  {} of logits, {}", gathered.0, gathered.1)?;
        }
        if self.layout.pp > 1 {
            let crosses = (0..self.layout.pp).any(|stage| self.layout.send_leaves_host(stage));
            writeln!(
                f,
                "  send/recv   {} × {} from each rank and the token's id back, {}; {}",
                traffic.sends - 1,
                Bytes(traffic.send_bytes),
                Time(traffic.send_s),
                if crosses { "some between hosts" } else { "all within one host" }
            )?;
        }
        Ok(())
    }

    fn times(&self, f: &mut Formatter<'_>) -> Result {
        let prefill = &self.prefill;
        writeln!(
            f,
            "\nprefill of {} tokens, alone: {} ({} tokens/s), {} of at most {} tokens, {:.0} % bubble",
            prefill.prompt_tokens,
            Time(prefill.seconds),
            Grouped(rounded(prefill.tokens_per_s)),
            if prefill.chunks == 1 { "1 chunk".to_owned() } else { format!("{} chunks", prefill.chunks) },
            prefill.chunk_tokens,
            100.0 * prefill.bubble_share
        )?;
        let context = self.decode.first().map_or(0, |row| row.step.context_tokens);
        writeln!(f, "\ndecode after {context} tokens")?;
        let latency = format!("{} in + {} out", self.prompt_tokens, self.gen_tokens);
        writeln!(
            f,
            "  {:>6} {:>13} {:>10} {:>15} {:>10} {:>7} {:>20}",
            "batch", "micro-batches", "step", "tokens/s each", "tokens/s", "bubble", latency
        )?;
        for row in &self.decode {
            write_step(f, &row.step)?;
            writeln!(f, " {:>20}{}", Time(row.end_to_end_s), if row.fits { "" } else { "  KV does not fit" })?;
        }
        if let Some(row) = self.decode.first() {
            let way = &row.step.way;
            writeln!(
                f,
                "  of batch {}: products {}, attention {}, small kernels and sampling {}, collectives {}, sends {}",
                row.step.batch,
                Time(way.products_s),
                Time(way.attention_s),
                Time(way.other_s),
                Time(way.collectives_s),
                Time(row.step.sends_s)
            )?;
        }
        Ok(())
    }

    fn micro_batches(&self, f: &mut Formatter<'_>) -> Result {
        let Some(batch) = self.micro_batches.first().map(|step| step.batch) else { return Ok(()) };
        writeln!(f, "\nmicro-batches at batch {batch}: {}", self.micro_batches_chosen)?;
        for step in &self.micro_batches {
            write_step(f, step)?;
            writeln!(f, "{}", if step.micro_batches == self.micro_batches_chosen { "  <" } else { "" })?;
        }
        let chosen = self.micro_batches.iter().find(|step| step.micro_batches == self.micro_batches_chosen);
        let best = self.micro_batches.iter().max_by(|a, b| a.tokens_per_s.total_cmp(&b.tokens_per_s));
        if let (Some(chosen), Some(best)) = (chosen, best)
            && best.tokens_per_s > 1.02 * chosen.tokens_per_s
        {
            let gain = 100.0 * (best.tokens_per_s / chosen.tokens_per_s - 1.0);
            writeln!(
                f,
                "  {} would give {gain:.0} % more: each micro-batch reads the weights again",
                best.micro_batches
            )?;
        }
        Ok(())
    }

    fn wish(&self, f: &mut Formatter<'_>) -> Result {
        let Some(wish) = &self.wished else { return Ok(()) };
        let line = |f: &mut Formatter<'_>, rule: &str, row: &Row| {
            writeln!(
                f,
                "{rule} {} micro-batches, for each of at most {} requests at once; {} in + {} out then take {}",
                row.step.micro_batches,
                row.step.batch,
                self.prompt_tokens,
                self.gen_tokens,
                Time(row.end_to_end_s)
            )
        };
        write!(f, "\n{} tokens/s: ", wish.tokens_per_s)?;
        match (&wish.step, &wish.step_at_fewest) {
            (None, None) => writeln!(f, "not even one request alone gets so many"),
            (Some(row), Some(fewest)) if fewest.step.batch > row.step.batch => {
                line(f, "by the engine's rule, with", row)?;
                line(f, "  with as few as stages, with", fewest)
            }
            (Some(row), _) | (None, Some(row)) => line(f, "with", row),
        }
    }

    fn basis(&self, f: &mut Formatter<'_>) -> Result {
        writeln!(f, "\n{}: {}", self.device.name, self.device.basis)?;
        write!(
            f,
            "exact: bytes of weights, KV and messages; estimated: workspace, reserve (a tenth); predicted: all times, for \
             evenly filled micro-batches, a prompt that waits for no other, and no overlap of messages with work"
        )
    }
}

/// The columns that all steps share.
fn write_step(f: &mut Formatter<'_>, step: &DecodeStep) -> Result {
    write!(
        f,
        "  {:>6} {:>13} {:>10} {:>15.1} {:>10} {:>7}",
        step.batch,
        step.micro_batches,
        Time(step.step_s),
        step.tokens_per_s_per_request,
        Grouped(rounded(step.tokens_per_s)),
        format!("{:.0} %", 100.0 * step.bubble_share)
    )
}

fn rounded(value: f64) -> u64 {
    crate::memory::whole_bytes(value.round())
}
