//! `run` and `chat` with a person or a pipe at the other end.

use crate::binary::{PATIENCE, Running, finish, pagemill, run, run_with_input, zoo};
use std::io::{BufReader, Read, Write};
use std::process::{ChildStdout, Stdio};
use std::time::{Duration, Instant};

fn model() -> String {
    zoo("llama").display().to_string()
}

#[test]
fn the_prompt_may_come_from_standard_input() {
    let model = model();
    let shared = ["run", "-m", &model, "-n", "8", "--temperature", "0"];
    let typed = run(&[&shared[..], &["the man went"]].concat());
    assert_eq!(typed.code, Some(0), "{}", typed.err);
    assert!(!typed.out.trim().is_empty());
    for arguments in [shared.to_vec(), [&shared[..], &["-"]].concat()] {
        let piped = run_with_input(&arguments, "the man went\n");
        assert_eq!((piped.code, &piped.out), (Some(0), &typed.out), "{}", piped.err);
    }
}

#[test]
fn raw_continues_the_text() {
    let model = model();
    let said = run(&["run", "-m", &model, "-n", "8", "--temperature", "0", "--raw", "the man went"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.out.starts_with("the man went") && said.out.trim_end().len() > "the man went".len(), "{}", said.out);
    let chat = run(&["run", "-m", &model, "-n", "8", "--temperature", "0", "the man went"]);
    assert!(!chat.out.starts_with("the man went"), "{}", chat.out);
}

#[test]
fn ranks_give_the_same_answer() {
    let model = model();
    let shared = ["run", "-m", &model, "-n", "16", "--temperature", "0", "--raw", "the man went"];
    let alone = run(&shared);
    assert_eq!(alone.code, Some(0), "{}", alone.err);
    for layout in [["-tp", "2", "--micro-batches=auto"], ["-pp", "2", "--micro-batches=3"], ["-pp=2", "-tp=2", "-t=4"]]
    {
        let said = run(&[&shared[..], &layout].concat());
        assert_eq!((said.code, &said.out), (Some(0), &alone.out), "{layout:?}: {}", said.err);
    }
}

#[test]
fn the_same_seed_gives_the_same_answer() {
    let model = model();
    let answer = |seed: &str| run(&["run", "-m", &model, "-n", "24", "-s", seed, "--temp", "1.5", "hello"]).out;
    assert_eq!(answer("7"), answer("7"));
    assert_ne!(answer("7"), answer("8"));
}

#[test]
fn verbose_prints_speed_to_standard_error() {
    let model = model();
    let said = run(&["run", "-v", "-m", &model, "-n", "8", "hello"]);
    assert!(said.err.contains("generated at") && !said.out.contains("tok/s"), "{}", said.err);
}

#[test]
fn a_closed_output_is_no_fault() {
    let cache = tempfile::tempdir().unwrap();
    let program = env!("CARGO_BIN_EXE_pagemill");
    for command in ["inspect --tensors MODEL", "plan MODEL", "run -m MODEL -n 200 hi", "--help", "pull --list"] {
        let command = command.replace("MODEL", &model());
        // The reader is gone before the first byte.
        let script = format!("({program} {command}; echo code $? >&2) | true");
        let mut shell = std::process::Command::new("sh");
        let said = finish(shell.args(["-c", &script]).env("PAGEMILL_CACHE", cache.path()));
        assert_eq!(said.err.trim(), "code 0", "{command}: {}", said.err);
    }
}

/// Reads until `text` has come, and returns all that was read.
fn read_until(out: &mut BufReader<ChildStdout>, text: &str) -> String {
    let deadline = Instant::now() + PATIENCE;
    let mut read = Vec::new();
    let mut byte = [0; 1];
    while !String::from_utf8_lossy(&read).contains(text) {
        assert!(Instant::now() < deadline, "{text:?} never came");
        let n = out.read(&mut byte).unwrap();
        assert!(n > 0, "ended before {text:?}: {}", String::from_utf8_lossy(&read));
        read.push(byte[0]);
    }
    String::from_utf8_lossy(&read).into_owned()
}

#[test]
fn ctrl_c_stops_the_answer_and_not_the_program() {
    let cache = tempfile::tempdir().unwrap();
    let mut command = pagemill(cache.path());
    command.args(["chat", &model(), "--temperature", "2", "--seed", "5", "--isa", "scalar", "--threads", "1"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut running = Running(child);
    read_until(&mut out, "Ctrl-C stops an answer");
    // Answers end when the model says so; one that is cut short by the signal is enough.
    let mut stopped = false;
    for _ in 0..50 {
        writeln!(input, "tell me everything").unwrap();
        std::thread::sleep(Duration::from_millis(60));
        running.signal("INT");
        writeln!(input, "/help").unwrap();
        if read_until(&mut out, "/clear forgets").contains("[stopped]") {
            stopped = true;
            break;
        }
    }
    assert!(stopped, "no answer was stopped");
    writeln!(input, "/exit").unwrap();
    assert_eq!(running.wait(), Some(0));
}

#[test]
fn ctrl_c_ends_a_run() {
    let cache = tempfile::tempdir().unwrap();
    let mut command = pagemill(cache.path());
    command.args(["run", "-m", &model(), "--raw", "--temperature", "2", "--isa", "scalar", "--threads", "1", "the"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut errors = child.stderr.take().unwrap();
    let mut running = Running(child);
    // The prompt is echoed when the model is loaded.
    read_until(&mut out, "the");
    running.signal("INT");
    assert_eq!(running.wait(), Some(1));
    let mut said = String::new();
    errors.read_to_string(&mut said).unwrap();
    assert_eq!(said, "pagemill: interrupted\n");
}

#[test]
fn a_chat_ends_with_its_input_and_survives_a_question_too_long() {
    let model = model();
    let long = "and again ".repeat(60);
    let input = format!("hello\n{long}\n/clear\n\nhello\n");
    let said = run_with_input(&["chat", &model, "-n", "6", "--temperature", "0", "--max-seq-len", "128"], &input);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.err.contains("the context holds 128"), "{}", said.err);
    assert!(said.out.contains("forgotten"), "{}", said.out);
}
