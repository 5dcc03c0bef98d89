//! Messages between ranks: how many bytes of which kind, over which link, in which time. Knows no layer's content.
//!
//! Times are those of the ring algorithms (Thakur, Rabenseifner, Gropp 2005): an all-reduce of `S` bytes over `n`
//! ranks moves `2 (n − 1) / n × S` bytes through each rank's link, an all-gather half of it. Over several hosts the
//! hosts first reduce within themselves, and each rank then carries its share between hosts.

use crate::{DecoderShape, Device, Layout};
use serde::Serialize;

/// Bytes of one sampled token, and what they take alone (a step of one sequence).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenTraffic {
    /// All-reduces of a token: two a layer, where a stage has several ranks.
    pub all_reduces: usize,
    /// Bytes of the sum in each.
    pub all_reduce_bytes: u64,
    /// Bytes that all of them move through each rank's link: `2 (n − 1) / n` of the sums.
    pub all_reduce_wire_bytes: u64,
    /// Seconds of all of them.
    pub all_reduce_s: f64,
    /// f32 logits gathered from the ranks of the last stage.
    pub all_gather_bytes: u64,
    /// Seconds.
    pub all_gather_s: f64,
    /// Sends of a token: one between stages, and its id back to the first.
    pub sends: usize,
    /// Bytes of a hidden state, sent by every rank to its peer in the next stage.
    pub send_bytes: u64,
    /// Seconds of all of them, one after another.
    pub send_s: f64,
    /// Hosts that the widest stage is on.
    pub hosts_per_stage: usize,
}

/// The time of messages.
#[derive(Clone, Copy, Debug)]
pub struct Traffic<'a> {
    /// Links.
    pub device: &'a Device,
    /// Ranks.
    pub layout: &'a Layout,
}

impl Traffic<'_> {
    /// Seconds to sum `bytes` over the ranks of `stage`.
    #[must_use]
    pub fn all_reduce_s(&self, stage: usize, bytes: f64) -> f64 {
        2.0 * self.moving_s(stage, bytes) + self.starting_s(stage)
    }

    /// Seconds until every rank of `stage` has all of `bytes`, of which each had its share.
    #[must_use]
    pub fn all_gather_s(&self, stage: usize, bytes: f64) -> f64 {
        self.moving_s(stage, bytes) + self.starting_s(stage)
    }

    /// Seconds of one round over the ring of `stage`.
    fn moving_s(&self, stage: usize, bytes: f64) -> f64 {
        if self.layout.tp == 1 {
            return 0.0;
        }
        let hosts = self.layout.hosts_of(stage) as f64;
        let in_host = (self.layout.tp as f64 / hosts).max(1.0);
        let (host, fabric) = (self.device.host_link.bytes_per_s, self.device.fabric_link.bytes_per_s);
        let within = (in_host - 1.0) / in_host * bytes / host;
        let between = (hosts - 1.0) / hosts * (bytes / in_host) / fabric;
        (within + between) / self.device.efficiency.link
    }

    /// Seconds of a collective of nothing: the host's latency, and the fabric's for every doubling of hosts.
    fn starting_s(&self, stage: usize) -> f64 {
        if self.layout.tp == 1 {
            return 0.0;
        }
        let hosts = self.layout.hosts_of(stage);
        let doublings = f64::from(hosts.next_power_of_two().trailing_zeros());
        self.device.host_link.collective_s + 2.0 * doublings * self.device.fabric_link.collective_s
    }

    /// Seconds to send `bytes` from each rank of `stage` to its peer in the next (from the last: in the first).
    #[must_use]
    pub fn send_s(&self, stage: usize, bytes: f64) -> f64 {
        if self.layout.pp == 1 {
            return 0.0;
        }
        let link = if self.layout.send_leaves_host(stage) { self.device.fabric_link } else { self.device.host_link };
        link.send_s + bytes / (link.bytes_per_s * self.device.efficiency.link)
    }

    /// Bytes and times of one token of one sequence.
    #[must_use]
    pub fn of_a_token(&self, shape: &DecoderShape) -> TokenTraffic {
        let hidden = shape.hidden_size as f64 * self.device.activation_bytes();
        let (tp, pp, last) = (self.layout.tp, self.layout.pp, self.layout.pp - 1);
        let all_reduces = if tp > 1 { 2 * shape.layers.len() } else { 0 };
        let wire = 2.0 * (tp as f64 - 1.0) / tp as f64 * hidden * all_reduces as f64;
        let all_reduce = |stage: usize| 2.0 * self.layout.stages[stage].len() as f64 * self.all_reduce_s(stage, hidden);
        let logits = if shape.gathers_logits(tp) { shape.vocab_size as f64 * 4.0 } else { 0.0 };
        let forward: f64 = (0..last).map(|stage| self.send_s(stage, hidden)).sum();
        TokenTraffic {
            all_reduces,
            all_reduce_bytes: crate::memory::whole_bytes(if tp > 1 { hidden } else { 0.0 }),
            all_reduce_wire_bytes: crate::memory::whole_bytes(wire),
            all_reduce_s: (0..pp).map(all_reduce).sum(),
            all_gather_bytes: crate::memory::whole_bytes(logits),
            all_gather_s: if shape.gathers_logits(tp) { self.all_gather_s(last, logits) } else { 0.0 },
            sends: if pp > 1 { pp } else { 0 },
            send_bytes: crate::memory::whole_bytes(if pp > 1 { hidden } else { 0.0 }),
            send_s: forward + self.send_s(last, 4.0),
            hosts_per_stage: (0..pp).map(|stage| self.layout.hosts_of(stage)).max().unwrap_or(1),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{WeightType, known};

    fn near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-9, "{found} is not {expected}");
    }

    #[test]
    fn a_token_of_llama_2_70b_by_hand() {
        let shape = known::shape("llama-2-70b").unwrap();
        let device = Device::named("a100-80g").unwrap();
        let layout = Layout::new(&shape, &WeightType::named("bf16").unwrap(), 8, 2, 8).unwrap();
        let token = Traffic { device: &device, layout: &layout }.of_a_token(&shape);
        // 2 × 80 sums of 8192 bf16; 7/4 of them pass each link.
        assert_eq!((token.all_reduces, token.all_reduce_bytes), (160, 16_384));
        assert_eq!(token.all_reduce_wire_bytes, 160 * 16_384 * 7 / 4);
        near(token.all_reduce_s, 160.0 * (14e-6 + 1.75 * 16_384.0 / (0.75 * 300e9)));
        assert_eq!(token.all_gather_bytes, 32_000 * 4);
        near(token.all_gather_s, 14e-6 + 0.875 * 128_000.0 / (0.75 * 300e9));
        // To the other host and, as a token id, back.
        assert_eq!((token.sends, token.send_bytes, token.hosts_per_stage), (2, 16_384, 1));
        near(token.send_s, 20e-6 + 16_384.0 / (0.75 * 25e9) + 20e-6 + 4.0 / (0.75 * 25e9));
    }

    #[test]
    fn a_stage_over_two_hosts_pays_for_the_fabric() {
        let shape = known::shape("llama-2-70b").unwrap();
        let device = Device::named("a100-80g").unwrap();
        let layout = |per_host| Layout::new(&shape, &WeightType::named("bf16").unwrap(), 8, 1, per_host).unwrap();
        let (one, two) = (layout(8), layout(4));
        let time = |layout: &Layout| Traffic { device: &device, layout }.all_reduce_s(0, 1e6);
        near(time(&one), 14e-6 + 2.0 * 0.875 * 1e6 / (0.75 * 300e9));
        near(time(&two), 14e-6 + 40e-6 + 2.0 * (0.75 * 1e6 / 300e9 + 0.5 * 0.25e6 / 25e9) / 0.75);
    }

    /// 32,000 rows do not divide over seven ranks: each has them all.
    #[test]
    fn logits_that_every_rank_has_are_not_gathered() {
        let shape = known::shape("llama-2-70b").unwrap();
        let device = Device::named("h200").unwrap();
        let layout = Layout::new(&shape, &WeightType::named("bf16").unwrap(), 7, 1, 8).unwrap();
        let token = Traffic { device: &device, layout: &layout }.of_a_token(&shape);
        assert_eq!((token.all_reduces, token.all_gather_bytes), (160, 0));
        assert!(token.all_gather_s == 0.0);
    }

    #[test]
    fn a_single_rank_says_nothing() {
        let shape = known::shape("llama-2-7b").unwrap();
        let device = Device::named("h200").unwrap();
        let layout = Layout::new(&shape, &WeightType::named("bf16").unwrap(), 1, 1, 8).unwrap();
        let token = Traffic { device: &device, layout: &layout }.of_a_token(&shape);
        assert_eq!((token.all_reduces, token.all_gather_bytes, token.sends, token.send_bytes), (0, 0, 0, 0));
        assert!(token.all_reduce_s + token.all_gather_s + token.send_s == 0.0);
    }
}
