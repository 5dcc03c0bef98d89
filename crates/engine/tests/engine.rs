//! The step loop with a fake executor: what listeners hear, what the executor is told, and that blocks
//! come back.
#![allow(clippy::unwrap_used)]

mod fake;

use fake::{Script, Sizes, engine, expected, prompt, request, request_with_room};
use pagemill_engine::{
    EngineEvent, EventReceiver, EventSink, Executor, FinishReason, InferenceEngine, RequestId, SequenceId, SinkClosed,
    SubmitError,
};
use pagemill_scheduler::{Refusal, Time};
use std::sync::{Arc, Mutex};

/// Steps until nothing is left; returns the steps taken.
fn run<E: Executor>(engine: &mut InferenceEngine<E>) -> u64 {
    for step in 0..100_000 {
        if !engine.step(Time(step * 1000)).unwrap() {
            assert!(!engine.has_work(), "nothing ran although something waits");
            return step;
        }
    }
    panic!("the engine does not come to rest");
}

fn drained(events: &EventReceiver) -> Vec<EngineEvent> {
    std::iter::from_fn(|| events.try_recv()).collect()
}

fn tokens(events: &[EngineEvent], wanted: u32) -> Vec<u32> {
    events
        .iter()
        .filter_map(|event| match event {
            EngineEvent::Token { choice, token, .. } if *choice == wanted => Some(*token),
            _ => None,
        })
        .collect()
}

fn assert_all_blocks_back<E: Executor>(engine: &InferenceEngine<E>) {
    let (_, kv_cache, _, _) = engine.parts();
    assert_eq!(kv_cache.stats().num_owned, 0, "blocks are still owned");
    kv_cache.check_integrity().unwrap();
}

#[test]
fn every_listener_hears_its_own_tokens_and_one_end() {
    for max_in_flight in [1, 2, 3] {
        let mut engine = engine(&Sizes::default(), Script { max_in_flight, ..Script::default() });
        let mut ears = Vec::new();
        for i in 0..20u32 {
            let prompt = prompt(i, 1 + 7 * i as usize);
            let (request, events) = request(&prompt, 1 + i as usize, 1);
            engine.submit(request, Time(0)).unwrap();
            ears.push((prompt, events));
        }
        run(&mut engine);
        for (i, (prompt, events)) in ears.iter().enumerate() {
            let heard = drained(events);
            assert_eq!(tokens(&heard, 0), expected(prompt, 0, 1 + i), "request {i}, {max_in_flight} in flight");
            let EngineEvent::Finished { choice: 0, reason: FinishReason::Length, usage } = heard[heard.len() - 1]
            else {
                panic!("request {i} ended with {:?}", heard.last());
            };
            assert_eq!((usage.prompt_tokens, usage.completion_tokens), (prompt.len(), 1 + i));
        }
        assert_all_blocks_back(&engine);
        let seen = engine.parts().2.seen.lock().unwrap();
        assert_eq!(seen.started.len(), 20);
        assert!(seen.ended.len() >= 19, "all but the last step's ends are told: {}", seen.ended.len());
        assert!(seen.most_in_flight <= max_in_flight);
        assert!(max_in_flight == 1 || seen.most_in_flight > 1, "plans overlap when they may");
    }
}

#[test]
fn a_tiny_pool_changes_nothing_that_is_heard() {
    let sizes = Sizes { num_blocks: 12, ..Sizes::default() };
    let mut engine = engine(&sizes, Script::default());
    let mut ears = Vec::new();
    for i in 0..8u32 {
        let prompt = prompt(i, 30);
        let (request, events) = request(&prompt, 60, 1);
        engine.submit(request, Time(0)).unwrap();
        ears.push((prompt, events));
    }
    run(&mut engine);
    assert!(engine.status().scheduler.preemptions > 0, "the pool was not tiny enough");
    for (prompt, events) in &ears {
        assert_eq!(tokens(&drained(events), 0), expected(prompt, 0, 60));
    }
    assert_all_blocks_back(&engine);
}

#[test]
fn choices_end_one_by_one() {
    let mut engine = engine(&Sizes::default(), Script::default());
    let prompt = prompt(3, 37);
    let (request, events) = request(&prompt, 25, 4);
    engine.submit(request, Time(0)).unwrap();
    run(&mut engine);
    let heard = drained(&events);
    for choice in 0..4 {
        assert_eq!(tokens(&heard, choice), expected(&prompt, choice, 25));
        let ends = heard.iter().filter(|e| matches!(e, EngineEvent::Finished { choice: c, .. } if *c == choice));
        assert_eq!(ends.count(), 1);
    }
    assert_all_blocks_back(&engine);
}

#[test]
fn a_finished_choice_says_nothing_more_and_the_others_go_on() {
    let mut engine = engine(&Sizes::default(), Script::default());
    let prompt = prompt(4, 10);
    let (request, events) = request(&prompt, 30, 3);
    let id = engine.submit(request, Time(0)).unwrap();
    for step in 0..5 {
        engine.step(Time(step)).unwrap();
    }
    let before = drained(&events);
    assert!(!tokens(&before, 1).is_empty());
    engine.finish_sequence(SequenceId { request: id, choice: 1 });
    engine.finish_sequence(SequenceId { request: id, choice: 1 });
    engine.finish_sequence(SequenceId { request: id, choice: 9 });
    engine.finish_sequence(SequenceId { request: RequestId(99), choice: 0 });
    run(&mut engine);
    let after = drained(&events);
    assert_eq!(tokens(&after, 1), [0u32; 0]);
    assert!(!after.iter().any(|e| matches!(e, EngineEvent::Finished { choice: 1, .. })));
    let whole: Vec<EngineEvent> = before.into_iter().chain(after).collect();
    assert_eq!(tokens(&whole, 0), expected(&prompt, 0, 30));
    assert_eq!(tokens(&whole, 2), expected(&prompt, 2, 30));
    assert_all_blocks_back(&engine);
}

#[test]
fn finishing_the_last_choice_ends_the_request() {
    let mut engine = engine(&Sizes::default(), Script::default());
    let (request, events) = request(&prompt(4, 10), 300, 2);
    let id = engine.submit(request, Time(0)).unwrap();
    engine.step(Time(0)).unwrap();
    for choice in 0..2 {
        engine.finish_sequence(SequenceId { request: id, choice });
    }
    assert!(!engine.has_work());
    assert_all_blocks_back(&engine);
    assert_eq!(drained(&events).len(), 2, "one token each");
    assert_eq!(events.recv(), None, "the sink is gone");
}

#[test]
fn abort_frees_blocks_at_once_in_every_phase() {
    for steps in 0..8 {
        let mut engine = engine(&Sizes::default(), Script::default());
        let (doomed, doomed_events) = request(&prompt(1, 90), 50, 2);
        let (other, other_events) = request(&prompt(2, 33), 20, 1);
        let id = engine.submit(doomed, Time(0)).unwrap();
        engine.submit(other, Time(0)).unwrap();
        for step in 0..steps {
            engine.step(Time(step)).unwrap();
        }
        engine.abort(id);
        let owned = engine.status().kv_cache.num_owned;
        assert!(owned <= 4, "after {steps} steps: {owned} blocks owned, the other request needs at most 4");
        drained(&doomed_events);
        run(&mut engine);
        engine.abort(id);
        assert_eq!(drained(&doomed_events), []);
        assert_eq!(tokens(&drained(&other_events), 0), expected(&prompt(2, 33), 0, 20));
        assert_all_blocks_back(&engine);
    }
}

#[test]
fn a_listener_that_goes_away_aborts_its_request_only() {
    let mut engine = engine(&Sizes::default(), Script::default());
    let (gone, gone_events) = request(&prompt(1, 40), 200, 1);
    let (stays, events) = request(&prompt(2, 40), 30, 1);
    engine.submit(gone, Time(0)).unwrap();
    engine.submit(stays, Time(0)).unwrap();
    for step in 0..4 {
        engine.step(Time(step)).unwrap();
    }
    drop(gone_events);
    engine.step(Time(5)).unwrap();
    assert_eq!(engine.status().aborted, 1);
    assert_eq!(engine.status().scheduler.num_running, 1);
    run(&mut engine);
    assert_eq!(tokens(&drained(&events), 0), expected(&prompt(2, 40), 0, 30));
    assert_all_blocks_back(&engine);
}

#[test]
fn a_listener_that_waits_in_the_queue_can_go_away_too() {
    let sizes = Sizes { num_blocks: 10, ..Sizes::default() };
    let mut engine = engine(&sizes, Script::default());
    let (first, _first_events) = request(&prompt(1, 100), 40, 1);
    let (waiting, waiting_events) = request(&prompt(2, 100), 40, 1);
    engine.submit(first, Time(0)).unwrap();
    engine.submit(waiting, Time(0)).unwrap();
    engine.step(Time(0)).unwrap();
    drop(waiting_events);
    engine.step(Time(1)).unwrap();
    assert_eq!((engine.status().aborted, engine.status().scheduler.num_waiting), (1, 0));
    run(&mut engine);
    assert_all_blocks_back(&engine);
}

#[test]
fn a_slow_listener_is_cut_off_and_nobody_waits_for_it() {
    let mut engine = engine(&Sizes::default(), Script::default());
    let (slow, slow_events) = request_with_room(&prompt(1, 12), 100, 1, 5);
    let (quick, quick_events) = request(&prompt(2, 12), 100, 1);
    engine.submit(slow, Time(0)).unwrap();
    engine.submit(quick, Time(0)).unwrap();
    run(&mut engine);
    assert_eq!(tokens(&drained(&slow_events), 0), expected(&prompt(1, 12), 0, 5));
    assert_eq!(engine.status().aborted, 1);
    assert_eq!(tokens(&drained(&quick_events), 0), expected(&prompt(2, 12), 0, 100));
    assert_all_blocks_back(&engine);
}

#[test]
fn a_sequence_that_fails_ends_alone() {
    let script = Script { nan_for: Some((RequestId(1), 1)), ..Script::default() };
    let mut engine = engine(&Sizes::default(), script);
    let (broken, broken_events) = request(&prompt(1, 12), 20, 3);
    let (sound, sound_events) = request(&prompt(2, 12), 20, 1);
    assert_eq!(engine.submit(broken, Time(0)), Ok(RequestId(1)));
    engine.submit(sound, Time(0)).unwrap();
    run(&mut engine);
    let heard = drained(&broken_events);
    let end = |choice: u32| {
        heard.iter().find_map(|event| match event {
            EngineEvent::Finished { choice: c, reason, .. } if *c == choice => Some(reason.clone()),
            _ => None,
        })
    };
    assert_eq!(end(1), Some(FinishReason::Failed("no logits".into())));
    assert_eq!(tokens(&heard, 1), expected(&prompt(1, 12), 1, 2));
    for choice in [0, 2] {
        assert_eq!(end(choice), Some(FinishReason::Length));
        assert_eq!(tokens(&heard, choice), expected(&prompt(1, 12), choice, 20));
    }
    assert_eq!(tokens(&drained(&sound_events), 0), expected(&prompt(2, 12), 0, 20));
    assert_all_blocks_back(&engine);
}

#[test]
fn a_failing_device_stops_the_engine_and_everyone_hears_it() {
    let mut engine = engine(&Sizes::default(), Script { fail_at_step: Some(3), ..Script::default() });
    let (a, a_events) = request(&prompt(1, 12), 20, 1);
    engine.submit(a, Time(0)).unwrap();
    let error = (0..5).find_map(|step| engine.step(Time(step)).err()).unwrap();
    assert!(error.to_string().contains("on fire"), "{error}");
    engine.fail_all("stopped");
    assert_eq!(drained(&a_events).pop(), Some(EngineEvent::Failed { message: "stopped".into() }));
}

#[test]
fn a_prompt_can_be_computed_without_generating() {
    let mut engine = engine(&Sizes::default(), Script::default());
    let (mut request, events) = request(&prompt(1, 50), 0, 1);
    request.sampling.prompt_logprobs = Some(0);
    engine.submit(request, Time(0)).unwrap();
    run(&mut engine);
    let heard = drained(&events);
    let mut next = 1;
    for event in &heard[..heard.len() - 1] {
        let EngineEvent::PromptLogprobs { start, logprobs } = event else { panic!("{event:?}") };
        assert_eq!(*start, next);
        next += logprobs.len();
    }
    assert_eq!(next, 50);
    assert!(matches!(heard.last(), Some(EngineEvent::Finished { usage, .. }) if usage.completion_tokens == 0));
    assert_all_blocks_back(&engine);
}

#[test]
fn refusals_reach_the_caller_and_leave_nothing_behind() {
    let mut engine = engine(&Sizes { num_blocks: 8, max_waiting: 2, ..Sizes::default() }, Script::default());
    let mut submit = |len: usize, max_tokens: usize, n: u32| {
        engine.submit(request(&prompt(1, len), max_tokens, n).0, Time(0)).map_err(|error| match error {
            SubmitError::Refused(refusal) => refusal,
            other => panic!("{other}"),
        })
    };
    assert_eq!(submit(0, 5, 1), Err(Refusal::EmptyPrompt));
    assert_eq!(submit(500, 13, 1), Err(Refusal::TooLong { tokens: 513, max_seq_len: 512 }));
    assert_eq!(submit(100, 100, 1), Err(Refusal::NeverFits { needed: 13, available: 8, block_size: 16 }));
    assert_eq!(submit(10, 5, 9), Err(Refusal::TooManyChoices { n: 9, max_batch_size: 8 }));
    submit(10, 5, 1).unwrap();
    submit(10, 5, 1).unwrap();
    assert_eq!(submit(10, 5, 1), Err(Refusal::QueueFull { limit: 2 }));
    assert_eq!(engine.status().scheduler.num_waiting, 2);
}

/// Notes what it is told, in order: the prompt's cached tokens, then each event.
#[derive(Clone, Default)]
struct NotingSink {
    notes: Arc<Mutex<Vec<String>>>,
}

impl EventSink for NotingSink {
    fn send(&mut self, event: EngineEvent) -> Result<(), SinkClosed> {
        let note = match event {
            EngineEvent::Token { choice, .. } => format!("token of {choice}"),
            EngineEvent::Finished { choice, usage, .. } => format!("end of {choice}, {} cached", usage.cached_tokens),
            other => format!("{other:?}"),
        };
        self.notes.lock().unwrap().push(note);
        Ok(())
    }

    fn is_closed(&self) -> bool {
        false
    }

    fn prompt_computed(&mut self, cached_tokens: usize) {
        self.notes.lock().unwrap().push(format!("{cached_tokens} cached"));
    }
}

/// Found by the simulator: a request whose first token was its last was never told of its prompt.
#[test]
fn the_prompt_is_told_before_a_first_token_that_is_the_last() {
    let mut engine = engine(&Sizes::default(), Script::default());
    for cached in [0, 32] {
        let sink = NotingSink::default();
        let (mut request, _events) = request(&prompt(5, 40), 1, 2);
        request.sink = Box::new(sink.clone());
        engine.submit(request, Time(0)).unwrap();
        run(&mut engine);
        let end = |choice: u32| format!("end of {choice}, {cached} cached");
        let due = [format!("{cached} cached"), "token of 0".to_owned(), end(0), "token of 1".to_owned(), end(1)];
        assert_eq!(*sink.notes.lock().unwrap(), due);
    }
}
