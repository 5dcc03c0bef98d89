//! The engine on its own thread: queues, draining, stopping, and the truth in `status`.
#![allow(clippy::unwrap_used)]

mod fake;

use crossbeam_channel::bounded;
use fake::{Script, Sizes, engine, expected, prompt, request};
use pagemill_engine::{EngineEvent, EngineHandle, EventReceiver, SequenceId, SubmitError};
use pagemill_scheduler::Refusal;
use std::time::{Duration, Instant};

fn spawn(script: Script) -> EngineHandle {
    EngineHandle::spawn(engine(&Sizes::default(), script))
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "timed out: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn last(events: &EventReceiver) -> Option<EngineEvent> {
    std::iter::from_fn(|| events.recv()).last()
}

#[test]
fn handles_are_shared_between_threads() {
    fn is_shared<T: Send + Sync + Clone>() {}
    is_shared::<EngineHandle>();
    let handle = spawn(Script::default());
    std::thread::scope(|scope| {
        for i in 0..12u32 {
            let handle = handle.clone();
            scope.spawn(move || {
                let prompt = prompt(i, 20 + i as usize);
                let generation = handle.generate(request(&prompt, 30, 2).0).unwrap();
                for (choice, completion) in (0..).zip(&generation.choices) {
                    assert_eq!(completion.tokens, expected(&prompt, choice, 30));
                    assert!(completion.finish.is_some());
                }
            });
        }
    });
    wait_until("idle", || handle.is_idle());
    let status = handle.status();
    assert_eq!((status.scheduler.num_running, status.scheduler.num_waiting, status.kv_cache.num_owned), (0, 0, 0));
    assert_eq!((status.stalled_for_us, status.stopped), (0, None));
    handle.shutdown();
}

#[test]
fn an_abort_takes_effect_within_one_step() {
    let (open, gate) = bounded(0);
    let handle = spawn(Script { gate: Some(gate), ..Script::default() });
    let (request, events) = request(&prompt(1, 10), 400, 1);
    let id = handle.submit(request).unwrap();
    open.send(()).unwrap();
    assert!(matches!(events.recv(), Some(EngineEvent::Token { .. })));
    handle.abort(id);
    // The abort may come before a second step or after it began, which then waits for the gate.
    wait_until("no work", || {
        let _ = open.try_send(());
        handle.status().scheduler.num_running == 0
    });
    assert_eq!(handle.status().kv_cache.num_owned, 0);
    assert!(handle.status().steps <= 2);
    assert!(last(&events).is_none_or(|event| matches!(event, EngineEvent::Token { .. })), "no end is told");
    handle.shutdown();
}

#[test]
fn a_finished_choice_is_over_within_one_step() {
    let (open, gate) = bounded(0);
    let handle = spawn(Script { gate: Some(gate), ..Script::default() });
    let (request, events) = request(&prompt(1, 10), 500, 1);
    let id = handle.submit(request).unwrap();
    open.send(()).unwrap();
    assert!(matches!(events.recv(), Some(EngineEvent::Token { .. })));
    handle.finish_sequence(SequenceId { request: id, choice: 0 });
    wait_until("idle", || {
        let _ = open.try_send(());
        handle.is_idle()
    });
    let rest: Vec<EngineEvent> = std::iter::from_fn(|| events.recv()).collect();
    assert!(rest.len() <= 1 && rest.iter().all(|e| matches!(e, EngineEvent::Token { .. })), "{rest:?}");
    handle.shutdown();
}

#[test]
fn a_stalled_step_shows_in_the_status() {
    let (open, gate) = bounded(0);
    let handle = spawn(Script { gate: Some(gate), ..Script::default() });
    assert_eq!(handle.status().stalled_for_us, 0);
    std::thread::sleep(Duration::from_millis(60));
    let (request, events) = request(&prompt(1, 10), 1, 1);
    handle.submit(request).unwrap();
    let first = handle.status().stalled_for_us;
    assert!(first < 50_000, "the idle time before does not count: {first}");
    wait_until("stall", || handle.status().stalled_for_us > 30_000);
    open.send(()).unwrap();
    assert!(matches!(last(&events), Some(EngineEvent::Finished { .. })));
    wait_until("idle", || handle.status().stalled_for_us == 0);
    handle.shutdown();
}

#[test]
fn draining_finishes_what_runs_and_refuses_the_rest() {
    let (open, gate) = bounded(0);
    let handle = spawn(Script { gate: Some(gate), ..Script::default() });
    let (running, events) = request(&prompt(1, 10), 12, 1);
    handle.submit(running).unwrap();
    handle.drain();
    assert_eq!(handle.submit(request(&prompt(2, 10), 5, 1).0), Err(SubmitError::Draining));
    assert!(!handle.is_idle());
    drop(open); // Every step runs from here on.
    assert!(matches!(last(&events), Some(EngineEvent::Finished { usage, .. }) if usage.completion_tokens == 12));
    wait_until("idle", || handle.is_idle());
    assert_eq!(handle.status().stopped, None);
    handle.shutdown();
}

#[test]
fn shutdown_tells_the_living_after_the_step_in_hand() {
    let (open, gate) = bounded(0);
    let handle = spawn(Script { gate: Some(gate), ..Script::default() });
    let (request_a, events) = request(&prompt(1, 10), 500, 1);
    handle.submit(request_a).unwrap();
    open.send(()).unwrap();
    let stopping = std::thread::spawn({
        let handle = handle.clone();
        move || handle.shutdown()
    });
    wait_until("shutting down", || {
        // Not `submit`, which would wait for the step in hand if it came too early.
        let (sender, answer) = bounded(1);
        handle.submit_with(request(&prompt(2, 3), 5, 1).0, Box::new(move |reply| drop(sender.send(reply))));
        matches!(answer.try_recv(), Ok(Err(SubmitError::Draining | SubmitError::Stopped(_))))
    });
    std::thread::sleep(Duration::from_millis(20));
    drop(open); // Every step runs from here on; 499 would be left.
    stopping.join().unwrap();
    let heard: Vec<EngineEvent> = std::iter::from_fn(|| events.recv()).collect();
    assert!(matches!(heard.last(), Some(EngineEvent::Failed { .. })), "{heard:?}");
    assert!(heard.len() <= 3, "at most two steps ran: {heard:?}");
    assert!(handle.status().stopped.unwrap().contains("shutting down"));
    assert!(matches!(handle.submit(request(&prompt(2, 3), 5, 1).0), Err(SubmitError::Stopped(_))));
    handle.shutdown();
}

#[test]
fn a_broken_engine_says_so_everywhere() {
    for (script, why) in [
        (Script { fail_at_step: Some(4), ..Script::default() }, "on fire"),
        (Script { panic_at_step: Some(4), ..Script::default() }, "planted panic"),
    ] {
        let handle = spawn(script);
        let (request_a, events) = request(&prompt(1, 10), 100, 1);
        handle.submit(request_a).unwrap();
        let Some(EngineEvent::Failed { message }) = last(&events) else { panic!("no failure was told") };
        assert!(message.contains(why), "{message}");
        wait_until("stopped", || handle.status().stopped.is_some());
        assert!(handle.status().stopped.unwrap().contains(why));
        assert_eq!(handle.status().stalled_for_us, 0);
        let refused = handle.submit(request(&prompt(2, 3), 5, 1).0);
        assert!(matches!(&refused, Err(SubmitError::Stopped(_))), "{refused:?}");
        handle.shutdown();
    }
}

#[test]
fn a_full_queue_refuses_and_every_reply_comes_once() {
    let (open, gate) = bounded(0);
    let handle = spawn(Script { gate: Some(gate), ..Script::default() });
    let (blocker, _blocker_events) = request(&prompt(1, 10), 1, 1);
    handle.submit(blocker).unwrap();
    // The step waits at the gate, so nothing leaves the queue.
    let (replies, answers) = bounded(4096);
    let mut ears = Vec::new();
    for i in 0..1500 {
        let (request, events) = request(&prompt(i, 3), 1, 1);
        let replies = replies.clone();
        handle.submit_with(request, Box::new(move |result| replies.send(result).unwrap()));
        ears.push(events);
    }
    let refused = answers.try_iter().filter(|r| matches!(r, Err(SubmitError::Refused(Refusal::QueueFull { .. }))));
    assert_eq!(refused.count(), 1500 - 1024);
    drop(open);
    let rest: Vec<_> = (0..1024).map(|_| answers.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
    // The scheduler's own queue holds 100.
    assert!(rest.iter().filter(|r| r.is_ok()).count() >= 100);
    wait_until("idle", || handle.is_idle());
    assert!(answers.is_empty());
    handle.shutdown();
}

#[test]
fn an_abandoned_engine_finishes_and_ends() {
    let (replies, answers) = bounded(1);
    let handle = spawn(Script::default());
    let prompt = prompt(1, 10);
    let (request, events) = request(&prompt, 50, 1);
    handle.submit_with(request, Box::new(move |result| replies.send(result).unwrap()));
    drop(handle);
    answers.recv().unwrap().unwrap();
    assert_eq!(events.gather(1).unwrap().choices[0].tokens, expected(&prompt, 0, 50));
}
