//! What a seed draws before anything runs, and what can be said of a request from the limits alone:
//! whether it must be refused, and how much work it is. Written from the documented rules, not from the
//! scheduler's code.

use crate::workload::{PlannedRequest, WorkloadLimits, draw_workload};
use crate::{Draw, ExecutorLimits, FakeModel, StepFault};
use pagemill_scheduler::{CacheGroup, KvCacheConfig, KvLayout, Refusal, SchedulerConfig, Time};

/// Everything that a history starts from.
pub(super) struct Setup {
    pub(super) scheduler: SchedulerConfig,
    pub(super) kv_cache: KvCacheConfig,
    pub(super) executor: ExecutorLimits,
    pub(super) model: FakeModel,
    pub(super) step_fault: Option<StepFault>,
    /// In order of arrival.
    pub(super) requests: Vec<PlannedRequest>,
    /// A step takes up to so many microseconds.
    pub(super) step_us_max: usize,
    /// What is drawn while the history runs.
    pub(super) draw: Draw,
}

impl Setup {
    pub(super) fn draw(seed: u64) -> Self {
        let mut draw = Draw::from_seed(seed);
        let mut scheduler = draw_scheduler(&mut draw);
        let kv_cache = draw_kv_cache(&mut draw, &scheduler);
        let executor = ExecutorLimits {
            num_blocks: kv_cache.num_blocks,
            block_size: kv_cache.block_size,
            max_batch_size: scheduler.max_batch_size,
            max_batch_tokens: scheduler.max_batch_tokens,
            prefill_chunk_size: scheduler.largest_chunk(),
            max_in_flight: draw.pick(&[1, 1, 2, 3, 4]),
        };
        scheduler.plan_ahead = executor.max_in_flight == 1 && !draw.one_in(3);
        scheduler.micro_batches = draw.pick(&[1, executor.max_in_flight]);
        scheduler.num_stages = draw.pick(&[1, 2, executor.max_in_flight]).min(executor.max_in_flight);
        let model = FakeModel { groups: kv_cache.groups.clone(), fails_one_in: draw.one_in(4).then_some(100) };
        let lost_step = draw.between(1, 60) as u64;
        let step_fault = match draw.between(0, 49) {
            0 => Some(StepFault::Submit(lost_step)),
            1 => Some(StepFault::Collect(lost_step)),
            _ => None,
        };
        let limits = WorkloadLimits {
            max_requests: 20,
            max_seq_len: scheduler.max_seq_len,
            max_batch_size: scheduler.max_batch_size,
        };
        let requests = draw_workload(&mut draw, limits, &model);
        Self {
            scheduler,
            kv_cache,
            executor,
            model,
            step_fault,
            requests,
            step_us_max: draw.pick(&[0, 50, 1_000]),
            draw,
        }
    }

    /// By name, every reason to refuse a request while `num_waiting` sequences wait.
    pub(super) fn reasons_to_refuse(&self, request: &PlannedRequest, num_waiting: usize) -> Vec<&'static str> {
        let num_tokens = request.prompt.len() + request.max_tokens;
        let reasons = [
            ("empty prompt", request.prompt.is_empty()),
            ("too many choices", request.n as usize > self.scheduler.max_batch_size),
            ("too long", num_tokens > self.scheduler.max_seq_len),
            ("never fits", self.blocks_needed(num_tokens) > self.kv_cache.num_blocks),
            ("queue full", num_waiting >= self.scheduler.max_waiting),
        ];
        reasons.iter().filter(|(_, due)| *due).map(|(name, _)| *name).collect()
    }

    /// The documented formula of `PagedKvCache::blocks_needed`.
    fn blocks_needed(&self, num_tokens: usize) -> usize {
        let KvCacheConfig { block_size, prefill_chunk_size, max_seq_len, layout, groups, .. } = &self.kv_cache;
        let held = |group: &CacheGroup| match (*layout, *group) {
            (KvLayout::Contiguous, _) => max_seq_len.div_ceil(*block_size),
            (KvLayout::Paged, CacheGroup::Full) => num_tokens.div_ceil(*block_size),
            (KvLayout::Paged, CacheGroup::SlidingWindow { window }) => {
                let chunk = (*prefill_chunk_size).min(num_tokens).max(1);
                let behind = (window + chunk).saturating_sub(2).div_ceil(*block_size) + 1;
                behind.min(num_tokens.div_ceil(*block_size))
            }
        };
        groups.iter().map(held).sum()
    }

    /// Steps that a request needs at most when nobody comes before it: prompt tokens (its own
    /// generated ones too, after a preemption) at the pace that is left beside a full batch of decodes,
    /// and one step for each token.
    pub(super) fn work(&self, request: &PlannedRequest) -> u64 {
        let SchedulerConfig { max_batch_size, max_batch_tokens, prefill_chunk_size, continuous_batching, .. } =
            self.scheduler;
        let pace = if continuous_batching {
            self.scheduler.mixed_batch_tokens.unwrap_or(max_batch_tokens).min(max_batch_tokens) - (max_batch_size - 1)
        } else {
            max_batch_tokens / max_batch_size
        };
        let pace = pace.clamp(1, prefill_chunk_size);
        let choice = (request.prompt.len() + request.max_tokens).div_ceil(pace) + request.max_tokens + 2;
        u64::from(request.n) * choice as u64
    }

    /// Whether a request's bound counts everybody: several plans in flight hold back preemption, and
    /// a static batch runs to its longest member.
    pub(super) fn waits_for_all(&self) -> bool {
        self.executor.max_in_flight > 1 || !self.scheduler.continuous_batching
    }

    /// Where a request that came at `now` stands in the order of precedence: the lowest runs first.
    pub(super) fn virtual_arrival(&self, request: &PlannedRequest, now: Time) -> i128 {
        i128::from(now.0) - i128::from(request.priority) * i128::from(self.scheduler.ageing_us)
    }
}

/// The name of a refusal among [`Setup::reasons_to_refuse`].
pub(super) fn name_of(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::EmptyPrompt => "empty prompt",
        Refusal::TooManyChoices { .. } => "too many choices",
        Refusal::TooLong { .. } => "too long",
        Refusal::NeverFits { .. } => "never fits",
        Refusal::QueueFull { .. } => "queue full",
    }
}

fn draw_scheduler(draw: &mut Draw) -> SchedulerConfig {
    let max_batch_size = draw.between(1, 8);
    let prefill_chunk_size = draw.pick(&[1, 3, 7, 16, 17, 32, 64]);
    let config = SchedulerConfig {
        max_batch_size,
        max_batch_tokens: max_batch_size + draw.pick(&[0, 1, 5, 16, 40, 64]),
        prefill_chunk_size,
        mixed_batch_tokens: None,
        max_seq_len: draw.between(24, 200),
        max_waiting: draw.between(3, 40),
        ageing_us: draw.pick(&[0, 1_000, 100_000]),
        continuous_batching: !draw.one_in(6),
        static_batch_wait_us: draw.pick(&[0, 500, 5_000]),
        micro_batches: 1,
        plan_ahead: false,
        num_stages: 1,
    };
    let mixed_batch_tokens = draw.one_in(3).then(|| max_batch_size + draw.pick(&[0, 4, 12]));
    SchedulerConfig { mixed_batch_tokens, ..config }
}

fn draw_kv_cache(draw: &mut Draw, scheduler: &SchedulerConfig) -> KvCacheConfig {
    let mut window = || CacheGroup::SlidingWindow { window: draw.between(1, 50) };
    let kinds = [
        vec![CacheGroup::Full],
        vec![window()],
        vec![CacheGroup::Full, window()],
        vec![window(), CacheGroup::Full, window()],
    ];
    let groups = kinds[draw.pick(&[0, 0, 0, 1, 2, 2, 3])].clone();
    let block_size = draw.pick(&[16, 16, 32]);
    let longest = groups.len() * scheduler.max_seq_len.div_ceil(block_size);
    let num_blocks = match draw.between(0, 4) {
        0 => draw.between(longest.div_ceil(2), longest),
        1 | 2 => draw.between(longest, 2 * longest),
        3 => draw.between(longest, 4 * longest),
        _ => 8 * longest,
    };
    KvCacheConfig {
        num_blocks,
        block_size,
        groups,
        layout: if draw.one_in(8) { KvLayout::Contiguous } else { KvLayout::Paged },
        max_seq_len: scheduler.max_seq_len,
        prefill_chunk_size: scheduler.largest_chunk(),
        prefix_cache: !draw.one_in(4),
    }
}
