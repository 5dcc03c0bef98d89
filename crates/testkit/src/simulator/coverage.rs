//! What happened in a history: a simulator that never meets the rare paths proves nothing about them.

macro_rules! coverage {
    ($($(#[$doc:meta])* $field:ident),* $(,)?) => {
        /// Counts over one history, or over many.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Coverage {
            $($(#[$doc])* pub $field: u64,)*
        }

        impl Coverage {
            /// Every count by name, for assertions and printing.
            #[must_use]
            pub fn counts(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($field), self.$field)),*]
            }

            /// Adds another history's counts.
            pub fn add(&mut self, other: &Self) {
                $(self.$field += other.$field;)*
            }
        }
    };
}

coverage! {
    /// Histories.
    histories,
    /// Of these, with several plans in flight.
    pipelined_histories,
    /// Of these, with steps planned while the one before runs.
    ahead_histories,
    /// Of these, with the contiguous layout.
    contiguous_histories,
    /// Steps run.
    steps,
    /// Of these, planned while the one before ran.
    steps_ahead,
    /// Sequences planned on a token that ended them.
    planned_on_ends,
    /// Requests taken.
    requests,
    /// Requests refused.
    refusals,
    /// Requests of which every choice ended by itself.
    requests_completed,
    /// Choices of `n > 1` requests that ended by themselves.
    sibling_choices_completed,
    /// Tokens that clients heard.
    tokens_heard,
    /// Prompt log-probabilities that clients heard.
    prompt_logprobs_heard,
    /// Choices that ended with a stop token.
    stop_tokens,
    /// Choices whose token could not be drawn.
    failed_sequences,
    /// Choices ended by a stop string.
    stop_strings,
    /// Requests aborted by id.
    aborts,
    /// Requests whose listener went away.
    closed_sinks,
    /// Requests whose listener's buffer was full.
    full_sinks,
    /// Aborted or closed with part of the prompt computed.
    aborts_in_mid_prefill,
    /// Aborted or closed with a step in flight.
    aborts_in_flight,
    /// Histories that ended with a lost device.
    lost_steps,
    /// Sequences that lost their blocks.
    preemptions,
    /// Of these, with several plans in flight.
    pipelined_preemptions,
    /// Of these, with steps planned ahead.
    ahead_preemptions,
    /// Tokens computed where a stage would have idled.
    filler_tokens,
    /// Cached blocks that made room.
    evictions,
    /// Blocks copied on write.
    copies_on_write,
    /// Prompt tokens found in the prefix cache.
    prefix_hit_tokens,
    /// Table entries seen whose block had gone back to the pool behind a window.
    reclaimed_entries,
    /// Padding slots of static batches.
    padding_tokens,
}
