//! Frames there and back, and every way in which bytes fail to be one.
#![allow(clippy::unwrap_used)] // tests

use pagemill_engine::{RequestId, SamplingParams, SequenceId, StartedRequest, StepInput, TokenLogprobs};
use pagemill_mpi::frame::{
    Counters, Frame, FrameError, Gpu, HEADER_BYTES, Hello, Invitation, MAX_HELLO_BYTES, VERSION,
};
use pagemill_scheduler::{BlockCopy, BlockId, SampledToken, ScheduledSequence, StepOutput, StepPlan};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

fn sequence_id() -> impl Strategy<Value = SequenceId> {
    (any::<u64>(), any::<u32>()).prop_map(|(request, choice)| SequenceId { request: RequestId(request), choice })
}

fn number() -> impl Strategy<Value = f32> {
    any::<f32>().prop_filter("NaN is not equal to itself", |value| !value.is_nan())
}

fn sequence() -> impl Strategy<Value = ScheduledSequence> {
    let tables = vec(vec(any::<u32>().prop_map(BlockId), 0..6), 0..3);
    let lists = (vec(any::<u32>(), 0..9), tables, vec(sequence_id(), 0..3));
    let places = (option::of(any::<u32>()), any::<u32>());
    (sequence_id(), lists, places, any::<bool>(), any::<u16>()).prop_map(
        |(id, (token_ids, block_tables, sample), (drawn_idx, start), prompt_logprobs, num_padding)| ScheduledSequence {
            id,
            token_ids,
            drawn_idx,
            start: start as usize,
            block_tables,
            sample,
            prompt_logprobs,
            num_padding: num_padding.into(),
        },
    )
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let floats = (number(), number(), number(), number(), number(), number());
    let options = (option::of(any::<u32>()), option::of(any::<u32>()), option::of(any::<u32>()));
    let lists = (vec((any::<u32>(), number()), 0..4), vec(any::<u32>(), 0..4));
    (floats, options, lists, any::<u64>(), any::<u32>()).prop_map(|(floats, options, lists, seed, min_tokens)| {
        SamplingParams {
            temperature: floats.0,
            top_k: options.0,
            top_p: floats.1,
            min_p: floats.2,
            repetition_penalty: floats.3,
            presence_penalty: floats.4,
            frequency_penalty: floats.5,
            logit_bias: lists.0,
            seed,
            logprobs: options.1,
            prompt_logprobs: options.2,
            min_tokens: min_tokens as usize,
            stop_token_ids: lists.1,
        }
    })
}

fn step() -> impl Strategy<Value = Frame> {
    let started = (any::<u64>(), vec(any::<u32>(), 0..9), sampling()).prop_map(|(id, prompt, sampling)| {
        StartedRequest { id: RequestId(id), prompt: prompt.into(), sampling: Arc::new(sampling) }
    });
    let copies = vec((any::<u32>(), any::<u32>()), 0..3);
    let ended = (vec(any::<u64>(), 0..3), vec(sequence_id(), 0..3), any::<bool>());
    (any::<u64>(), copies, vec(sequence(), 0..4), vec(started, 0..3), ended).prop_map(
        |(step, copies, sequences, started, (ended, ended_sequences, after_idle))| {
            let copy = |(src, dst)| BlockCopy { src: BlockId(src), dst: BlockId(dst) };
            let block_copies = copies.into_iter().map(copy).collect();
            let plan = StepPlan { step, block_copies, sequences, ..StepPlan::default() };
            let ended = ended.into_iter().map(RequestId).collect();
            Frame::Step(Arc::new(StepInput { plan, started, ended, ended_sequences, after_idle }))
        },
    )
}

fn logprobs() -> impl Strategy<Value = TokenLogprobs> {
    (number(), any::<u32>(), vec((any::<u32>(), number()), 0..4)).prop_map(|(logprob, rank, top)| TokenLogprobs {
        logprob,
        rank,
        top,
    })
}

fn output() -> impl Strategy<Value = Frame> {
    let token = prop_oneof![any::<u32>().prop_map(Ok), "[a-zé ]{0,20}".prop_map(Err)];
    let sampled = (sequence_id(), token, option::of(logprobs())).prop_map(|(id, token, logprobs)| SampledToken {
        id,
        token,
        logprobs,
    });
    let prompt = (sequence_id(), any::<u32>(), vec(logprobs(), 0..3))
        .prop_map(|(id, position, entries)| (id, position as usize, entries));
    (any::<u64>(), vec(sampled, 0..4), vec(prompt, 0..3), counters()).prop_map(
        |(step, sampled, prompt_logprobs, counters)| Frame::Output {
            output: StepOutput { step, sampled, prompt_logprobs },
            counters,
        },
    )
}

fn counters() -> impl Strategy<Value = Counters> {
    (any::<u64>(), any::<u64>()).prop_map(|(busy_us, workspace_grown)| Counters { busy_us, workspace_grown })
}

fn hello() -> impl Strategy<Value = Frame> {
    let gpu = (any::<[u8; 16]>(), any::<bool>()).prop_map(|(uuid, is_shared)| Gpu { uuid, is_shared });
    let numbers = (any::<u32>(), any::<u32>());
    (any::<[u8; 16]>(), numbers, any::<[u8; 32]>(), option::of(gpu), "[a-z.é]{0,40}").prop_map(
        |(token, (world_size, rank), fingerprint, gpu, host)| {
            Frame::Hello(Hello { token, world_size, rank, fingerprint, gpu, host })
        },
    )
}

fn frame() -> impl Strategy<Value = Frame> {
    prop_oneof![
        hello(),
        any::<[u8; 16]>().prop_map(|token| Frame::Welcome { token }),
        any::<[u64; 3]>().prop_map(|[available_bytes, weight_bytes, workspace_bytes]| Frame::Loaded {
            available_bytes,
            weight_bytes,
            workspace_bytes
        }),
        any::<u64>().prop_map(|num_blocks| Frame::Pool { num_blocks }),
        Just(Frame::Ready),
        step(),
        output(),
        counters().prop_map(Frame::Heartbeat),
        "[a-zé ]{0,80}".prop_map(|reason| Frame::Error { reason }),
        Just(Frame::Shutdown),
    ]
}

fn encoded(frame: &Frame) -> Vec<u8> {
    let mut bytes = vec![1, 2, 3];
    frame.encode(&mut bytes).unwrap();
    bytes
}

proptest! {
    #[test]
    fn what_goes_out_comes_in(frame in frame()) {
        prop_assert_eq!(Frame::from_bytes(&encoded(&frame)).unwrap(), frame);
    }

    #[test]
    fn a_frame_that_is_cut_anywhere_is_refused(frame in frame(), at in any::<prop::sample::Index>()) {
        let bytes = encoded(&frame);
        let cut = at.index(bytes.len());
        let refused = matches!(Frame::from_bytes(&bytes[..cut]), Err(FrameError::Truncated { .. }));
        prop_assert!(refused);
        // The same with a header that announces what is there.
        if cut >= HEADER_BYTES {
            let mut cut_bytes = bytes[..cut].to_vec();
            cut_bytes[8..12].copy_from_slice(&u32::try_from(cut - HEADER_BYTES).unwrap().to_le_bytes());
            prop_assert!(Frame::from_bytes(&cut_bytes).is_err());
        }
    }

    #[test]
    fn bytes_behind_a_frame_are_refused(frame in frame(), more in vec(any::<u8>(), 1..9)) {
        let mut bytes = encoded(&frame);
        bytes.extend(&more);
        prop_assert_eq!(Frame::from_bytes(&bytes).unwrap_err(), FrameError::Trailing { bytes: more.len() });
        let body_bytes = u32::try_from(bytes.len() - HEADER_BYTES).unwrap();
        bytes[8..12].copy_from_slice(&body_bytes.to_le_bytes());
        prop_assert!(Frame::from_bytes(&bytes).is_err());
    }

    #[test]
    fn any_bytes_give_a_frame_or_an_error(frame in frame(), flips in vec((any::<prop::sample::Index>(), any::<u8>()), 1..5)) {
        let mut bytes = encoded(&frame);
        for (at, byte) in flips {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(frame) = Frame::from_bytes(&bytes) {
            prop_assert_eq!(encoded(&frame), bytes);
        }
    }

    #[test]
    fn invitations_travel(addresses in vec((any::<IpAddr>(), any::<u16>()), 0..=32), tokens in any::<([u8; 16], [u8; 16])>()) {
        let addresses: Vec<SocketAddr> =
            addresses.into_iter().map(|(ip, port)| SocketAddr::new(ip.to_canonical(), port)).collect();
        let invitation = Invitation { addresses, token: tokens.0, answer: tokens.1 };
        let bytes = invitation.encode().unwrap();
        prop_assert!(bytes.len() <= pagemill_mpi::frame::MAX_INVITATION_BYTES);
        prop_assert_eq!(Invitation::decode(&bytes).unwrap(), invitation);
        prop_assert!(Invitation::decode(&bytes[..bytes.len() - 1]).is_err());
    }
}

#[test]
fn headers_are_checked() {
    let good = encoded(&Frame::Ready);
    assert_eq!(good.len(), HEADER_BYTES);
    let with = |range: std::ops::Range<usize>, bytes: &[u8]| {
        let mut changed = good.clone();
        changed[range].copy_from_slice(bytes);
        Frame::from_bytes(&changed).unwrap_err()
    };
    assert_eq!(with(0..4, b"HTTP"), FrameError::Magic { found: *b"HTTP" });
    assert_eq!(with(4..6, &(VERSION + 1).to_le_bytes()), FrameError::Version { found: VERSION + 1 });
    assert_eq!(with(6..8, &[0, 0]), FrameError::Kind { kind: 0 });
    assert_eq!(with(6..8, &[11, 0]), FrameError::Kind { kind: 11 });
    assert!(matches!(with(8..12, &[0xff; 4]), FrameError::TooLong { field: "body", .. }));
    assert!(matches!(with(8..12, &[1, 0, 0, 0]), FrameError::Truncated { field: "body", needed: 1, left: 0 }));
}

/// A count that no byte pays for must not be believed.
#[test]
fn counts_are_paid_for_in_bytes() {
    let empty = Frame::Step(Arc::default());
    let good = encoded(&empty);
    // step, then the counts of: copies, sequences, started, ended, ended sequences.
    for (at, field) in ["block_copies", "sequences", "started", "ended", "ended_sequences"].into_iter().enumerate() {
        let place = HEADER_BYTES + 8 + 4 * at;
        for (count, is_too_long) in [(1u32, false), (1 << 20, false), ((1 << 20) + 1, true), (u32::MAX, true)] {
            let mut bytes = good.clone();
            bytes[place..place + 4].copy_from_slice(&count.to_le_bytes());
            match Frame::from_bytes(&bytes).unwrap_err() {
                FrameError::TooLong { field: named, .. } => assert!(is_too_long && named == field, "{named}"),
                // One entry may be read from the bytes of what follows; then something later is missing.
                FrameError::Truncated { field: named, .. } => {
                    assert!(!is_too_long && (count == 1 || named == field), "{named}");
                }
                other => panic!("{other}"),
            }
        }
    }
}

#[test]
fn flags_and_texts_have_one_spelling() {
    let error = Frame::Error { reason: "é".into() };
    let mut bytes = encoded(&error);
    *bytes.last_mut().unwrap() = 0xff;
    assert_eq!(Frame::from_bytes(&bytes).unwrap_err(), FrameError::Text { field: "reason" });
    let sampled = SampledToken { id: SequenceId { request: RequestId(1), choice: 0 }, token: Ok(7), logprobs: None };
    let output = StepOutput { step: 1, sampled: vec![sampled], prompt_logprobs: Vec::new() };
    let mut bytes = encoded(&Frame::Output { output, counters: Counters::default() });
    // Behind the counters, the step, the count and the id.
    bytes[HEADER_BYTES + 16 + 8 + 4 + 12] = 2;
    assert_eq!(Frame::from_bytes(&bytes).unwrap_err(), FrameError::Value { field: "token", got: 2 });
}

/// What is read of a peer that is not known yet is enough for the longest first word.
#[test]
fn a_first_word_fits() {
    let gpu = Some(Gpu { uuid: [0xff; 16], is_shared: true });
    let hello = Hello { token: [0; 16], world_size: 2, rank: 1, fingerprint: [0; 32], gpu, host: "h".repeat(256) };
    let bytes = encoded(&Frame::Hello(hello));
    assert!(bytes.len() - HEADER_BYTES <= MAX_HELLO_BYTES, "{}", bytes.len());
    let name = gpu.map(|gpu| Gpu { uuid: std::array::from_fn(|at| u8::try_from(at).unwrap()), ..gpu }.name());
    assert_eq!(name.as_deref(), Some("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"));
}

#[test]
fn long_reasons_are_cut_between_characters() {
    let bytes = encoded(&Frame::Error { reason: format!("x{}", "é".repeat(4096)) });
    let Frame::Error { reason } = Frame::from_bytes(&bytes).unwrap() else { panic!("another frame") };
    assert_eq!(reason.len(), 4095);
}
