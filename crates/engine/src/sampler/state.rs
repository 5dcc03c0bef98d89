//! What the sampler remembers of requests: their parameters, and for each choice how much it has
//! generated and, when a penalty needs it, which tokens. Lives from the plan in which a request starts
//! until the executor hears that it ended; a preemption in between changes nothing.

use crate::SamplingParams;
use crate::executor::StartedRequest;
use pagemill_scheduler::{RequestId, SequenceId};
use std::collections::HashMap;
use std::sync::Arc;

/// One choice's past.
#[derive(Clone, Debug, Default)]
pub(crate) struct SequenceState {
    /// Distinct ids of the prompt, sorted; empty unless the repetition penalty is on.
    prompt_ids: Arc<[u32]>,
    /// Times each id was generated, by id; `None` when no penalty asks.
    output_counts: Option<Vec<(u32, u32)>>,
    output_len: usize,
}

impl SequenceState {
    /// Distinct ids of the prompt, sorted; empty unless the repetition penalty is on.
    pub(crate) fn prompt_ids(&self) -> &[u32] {
        &self.prompt_ids
    }

    /// Ids generated so far with their counts, by id; empty when no penalty asks.
    pub(crate) fn output_counts(&self) -> &[(u32, u32)] {
        self.output_counts.as_deref().unwrap_or_default()
    }

    /// Tokens generated so far.
    pub(crate) fn output_len(&self) -> usize {
        self.output_len
    }

    /// Records a generated token.
    pub(crate) fn push(&mut self, token: u32) {
        self.output_len += 1;
        if let Some(counts) = &mut self.output_counts {
            match counts.binary_search_by_key(&token, |&(id, _)| id) {
                Ok(at) => counts[at].1 += 1,
                Err(at) => counts.insert(at, (token, 1)),
            }
        }
    }
}

/// One live request.
#[derive(Debug)]
pub(crate) struct RequestState {
    /// How its tokens are chosen.
    pub(crate) params: Arc<SamplingParams>,
    /// Its prompt.
    pub(crate) prompt: Arc<[u32]>,
    /// What a choice starts from.
    fresh: SequenceState,
    /// By choice; `None` before its first token and after its end.
    choices: Vec<Option<SequenceState>>,
}

impl RequestState {
    /// A request that has generated nothing.
    pub(crate) fn new(prompt: Arc<[u32]>, params: Arc<SamplingParams>) -> Self {
        let repetition = params.repetition_penalty != 1.0;
        let counted = params.has_penalties();
        let mut prompt_ids: Vec<u32> = if repetition { prompt.to_vec() } else { Vec::new() };
        prompt_ids.sort_unstable();
        prompt_ids.dedup();
        let fresh =
            SequenceState { prompt_ids: prompt_ids.into(), output_counts: counted.then(Vec::new), output_len: 0 };
        Self { params, prompt, fresh, choices: Vec::new() }
    }

    /// The past of a choice; a choice that has none yet has the fresh one.
    pub(crate) fn choice(&self, choice: u32) -> &SequenceState {
        self.choices.get(choice as usize).and_then(Option::as_ref).unwrap_or(&self.fresh)
    }

    /// The same, to record a token.
    pub(crate) fn choice_mut(&mut self, choice: u32) -> &mut SequenceState {
        let at = choice as usize;
        if self.choices.len() <= at {
            self.choices.resize(at + 1, None);
        }
        let fresh = &self.fresh;
        self.choices[at].get_or_insert_with(|| fresh.clone())
    }
}

/// All live requests of a rank.
#[derive(Debug, Default)]
pub(crate) struct RequestTable {
    requests: HashMap<RequestId, RequestState>,
}

impl RequestTable {
    /// Takes in what changed since the last step.
    pub(crate) fn update(&mut self, started: &[StartedRequest], ended: &[RequestId], ended_sequences: &[SequenceId]) {
        for id in ended {
            self.requests.remove(id);
        }
        for id in ended_sequences {
            if let Some(choice) =
                self.requests.get_mut(&id.request).and_then(|request| request.choices.get_mut(id.choice as usize))
            {
                *choice = None;
            }
        }
        for request in started {
            let state = RequestState::new(Arc::clone(&request.prompt), Arc::clone(&request.sampling));
            self.requests.insert(request.id, state);
        }
    }

    /// A live request.
    pub(crate) fn get(&self, id: RequestId) -> Option<&RequestState> {
        self.requests.get(&id)
    }

    /// A live request, to record a token.
    pub(crate) fn get_mut(&mut self, id: RequestId) -> Option<&mut RequestState> {
        self.requests.get_mut(&id)
    }

    /// Live requests.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn started(id: u64, prompt: &[u32], params: SamplingParams) -> StartedRequest {
        StartedRequest { id: RequestId(id), prompt: prompt.into(), sampling: Arc::new(params) }
    }

    #[test]
    fn prompts_and_counts_are_kept_only_when_a_penalty_needs_them() {
        let mut table = RequestTable::default();
        let plain = SamplingParams::default();
        let repetition = SamplingParams { repetition_penalty: 1.3, ..SamplingParams::default() };
        let presence = SamplingParams { presence_penalty: 0.5, ..SamplingParams::default() };
        table.update(
            &[started(1, &[3, 1, 3], plain), started(2, &[3, 1, 3], repetition), started(3, &[3, 1, 3], presence)],
            &[],
            &[],
        );
        for (id, prompt_ids, counts) in [(1, vec![], vec![]), (2, vec![1, 3], vec![(9, 2)]), (3, vec![], vec![(9, 2)])]
        {
            let request = table.get_mut(RequestId(id)).unwrap();
            request.choice_mut(1).push(9);
            request.choice_mut(1).push(9);
            assert_eq!(request.choice(1).prompt_ids(), prompt_ids);
            assert_eq!(request.choice(1).output_counts(), counts);
            assert_eq!(request.choice(1).output_len(), 2);
            assert_eq!(request.choice(0).output_len(), 0, "choices are separate");
        }
    }

    #[test]
    fn ended_requests_and_choices_are_forgotten() {
        let mut table = RequestTable::default();
        table.update(&[started(1, &[5], SamplingParams::default())], &[], &[]);
        table.get_mut(RequestId(1)).unwrap().choice_mut(2).push(7);
        table.update(&[], &[], &[SequenceId { request: RequestId(1), choice: 2 }]);
        assert_eq!(table.get(RequestId(1)).unwrap().choice(2).output_len(), 0);
        table.update(&[], &[RequestId(1), RequestId(8)], &[SequenceId { request: RequestId(8), choice: 0 }]);
        assert_eq!(table.len(), 0);
    }
}
