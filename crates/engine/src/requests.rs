//! Tables of live requests, in the order of their ids. Know nothing of what is kept of a request.

use pagemill_scheduler::RequestId;

/// What is kept of live requests, by id. Ids only grow, so a request is appended; plans and events name requests mostly
/// in ascending order, so a look-up begins behind the last one.
pub(crate) struct ByRequest<T> {
    /// Ascending. Apart from the values, so that a search touches few cache lines.
    ids: Vec<RequestId>,
    /// Aligned with `ids`.
    values: Vec<T>,
    /// Behind the one looked up last.
    next: usize,
}

impl<T> Default for ByRequest<T> {
    fn default() -> Self {
        Self { ids: Vec::new(), values: Vec::new(), next: 0 }
    }
}

impl<T> ByRequest<T> {
    /// Adds a request whose id is larger than any before.
    pub(crate) fn push(&mut self, id: RequestId, value: T) {
        assert!(self.ids.last().is_none_or(|last| *last < id), "{id:?} is not the newest request");
        self.ids.push(id);
        self.values.push(value);
    }

    /// A live request's.
    pub(crate) fn get_mut(&mut self, id: RequestId) -> Option<&mut T> {
        let at = self.find(id)?;
        self.next = at + 1;
        self.values.get_mut(at)
    }

    /// Whether a request is live.
    pub(crate) fn contains(&self, id: RequestId) -> bool {
        self.find(id).is_some()
    }

    /// Forgets a request; cost: the number of live ones.
    pub(crate) fn remove(&mut self, id: RequestId) -> Option<T> {
        let at = self.find(id)?;
        self.next = at;
        self.ids.remove(at);
        Some(self.values.remove(at))
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// All, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (RequestId, &T)> {
        self.ids.iter().copied().zip(&self.values)
    }

    /// All, in order.
    pub(crate) fn into_values(self) -> impl Iterator<Item = T> {
        self.values.into_iter()
    }

    fn find(&self, id: RequestId) -> Option<usize> {
        let is_next = self.ids.get(self.next) == Some(&id);
        if is_next { Some(self.next) } else { self.ids.binary_search(&id).ok() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SamplingParams;
    use crate::request::LiveRequest;
    use std::sync::Arc;

    type LiveRequests = ByRequest<LiveRequest>;

    /// A request whose prompt has as many tokens as its id says.
    fn request(id: u64) -> LiveRequest {
        let prompt: Vec<u32> = vec![0; usize::try_from(id).unwrap_or(0)];
        LiveRequest::new(prompt.into(), Arc::new(SamplingParams::default()), 1)
    }

    fn prompt_len(requests: &mut LiveRequests, id: u64) -> Option<usize> {
        requests.get_mut(RequestId(id)).map(|request| request.prompt.len())
    }

    #[test]
    fn finds_requests_in_any_order_while_others_end() {
        let mut requests = LiveRequests::default();
        for id in [2, 3, 5, 8] {
            requests.push(RequestId(id), request(id));
        }
        for id in [2, 3, 5, 8, 8, 3, 2] {
            assert_eq!(prompt_len(&mut requests, id), Some(usize::try_from(id).unwrap_or(0)));
        }
        assert_eq!(requests.remove(RequestId(3)).map(|request| request.prompt.len()), Some(3));
        assert!(requests.remove(RequestId(3)).is_none());
        for (id, expected) in [(5, Some(5)), (3, None), (8, Some(8)), (9, None), (2, Some(2)), (1, None)] {
            assert_eq!(prompt_len(&mut requests, id), expected);
        }
        let ids: Vec<u64> = requests.iter().map(|(id, _)| id.0).collect();
        assert_eq!(ids, [2, 5, 8]);
        assert_eq!(requests.into_values().map(|request| request.prompt.len()).collect::<Vec<_>>(), [2, 5, 8]);
    }
}
