//! `pull owner/name` against a double of the Hugging Face hub: whole, broken off, refused, and malicious.

use crate::binary::{Said, assert_refused, finish, pagemill, zoo};
use crate::hub_double::{Behaviour, HubDouble, files_of};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};

fn pull_as(hub: &HubDouble, cache: &Path, model: &str) -> Said {
    finish(pagemill(cache).env("HF_ENDPOINT", &hub.endpoint).args(["pull", model]))
}

fn pull(hub: &HubDouble, cache: &Path) -> Said {
    pull_as(hub, cache, "owner/name")
}

fn model_folder(cache: &Path) -> PathBuf {
    cache.join("hub-models/owner--name--main")
}

fn llama() -> HubDouble {
    let hub = HubDouble::of_folder(&zoo("llama"));
    hub.behaviour().also_listed = vec!["README.md".into(), "onnx/model.onnx".into(), ".gitattributes".into()];
    hub
}

/// The pulled folder holds exactly what the loader reads, byte for byte, and nothing else is left.
#[track_caller]
fn assert_whole(cache: &Path) {
    let mut expected = files_of(&zoo("llama"));
    expected.remove("golden.json");
    assert!(files_of(&model_folder(cache)) == expected, "files differ");
    let left: Vec<_> = std::fs::read_dir(cache).unwrap().flatten().map(|e| e.file_name()).collect();
    assert!(left.iter().all(|n| n == "hub-models" || n == "hub"), "{left:?}");
    assert_eq!(std::fs::read_dir(cache.join("hub")).unwrap().count(), 0, "downloads are moved, not doubled");
}

#[track_caller]
fn assert_nothing_pulled(cache: &Path) {
    assert!(!model_folder(cache).exists());
    let staging =
        std::fs::read_dir(cache).unwrap().flatten().any(|e| e.file_name().to_string_lossy().contains("staging"));
    assert!(!staging);
}

#[test]
fn a_folder_is_pulled_and_answers_without_the_network() {
    let cache = tempfile::tempdir().unwrap();
    let hub = llama();
    hub.behaviour().redirects = true;
    let said = pull(&hub, cache.path());
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.out.contains("owner/name fetched: ") && said.err.is_empty(), "{} {}", said.out, said.err);
    assert_whole(cache.path());
    let requests = hub.behaviour().requests.len();
    let again = pull(&hub, cache.path());
    assert!(again.out.contains("already here"), "{}", again.out);
    let mut run = pagemill(cache.path());
    run.env("HF_ENDPOINT", &hub.endpoint).args(["run", "--model", "owner/name", "-n", "6", "hello"]);
    let answer = finish(&mut run);
    assert_eq!(answer.code, Some(0), "{}", answer.err);
    assert!(!answer.out.trim().is_empty());
    assert_eq!(hub.behaviour().requests.len(), requests, "what is here is not asked for again");
}

#[test]
fn run_fetches_what_is_not_here() {
    let cache = tempfile::tempdir().unwrap();
    let hub = llama();
    let mut run = pagemill(cache.path());
    run.env("HF_ENDPOINT", format!("{}/", hub.endpoint)).args(["run", "--model", "owner/name", "-n", "6", "hello"]);
    let answer = finish(&mut run);
    assert_eq!(answer.code, Some(0), "{}", answer.err);
    assert_whole(cache.path());
}

#[test]
fn a_connection_that_breaks_is_taken_up_where_it_broke() {
    let cache = tempfile::tempdir().unwrap();
    let hub = llama();
    hub.behaviour().cuts.insert("model.safetensors".into(), VecDeque::from([100_000, 50_000]));
    let said = pull(&hub, cache.path());
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_whole(cache.path());
    let requests = hub.behaviour().requests.join("\n");
    for range in ["Some((100000, None))", "Some((150000, None))"] {
        assert!(requests.contains(&format!("model.safetensors {range}")), "{requests}");
    }
}

#[test]
fn a_pull_that_failed_is_taken_up_by_the_next() {
    let cache = tempfile::tempdir().unwrap();
    let hub = llama();
    hub.behaviour().cuts.insert("model.safetensors".into(), VecDeque::from([100_000, 0, 0]));
    let said = pull(&hub, cache.path());
    assert_refused(&said, &["model.safetensors", "100000 of 1448224 bytes are kept"]);
    assert_nothing_pulled(cache.path());
    hub.behaviour().requests.clear();
    let said = pull(&hub, cache.path());
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_whole(cache.path());
    let requests = hub.behaviour().requests.join("\n");
    assert!(requests.contains("model.safetensors Some((100000, None))"), "{requests}");
    assert!(!requests.contains("tokenizer.json Some((0, None))"), "whole files are kept: {requests}");
}

#[test]
fn a_server_that_cannot_resume_does_not_damage_the_file() {
    let cache = tempfile::tempdir().unwrap();
    let hub = llama();
    hub.behaviour().cuts.insert("model.safetensors".into(), VecDeque::from([100_000]));
    hub.behaviour().ignores_ranges = true;
    let said = pull(&hub, cache.path());
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_whole(cache.path());
}

#[test]
fn a_partial_file_that_is_too_long_does_not_block_for_ever() {
    let cache = tempfile::tempdir().unwrap();
    let hub = llama();
    hub.behaviour().cuts.insert("model.safetensors".into(), VecDeque::from([100_000, 0, 0]));
    assert_ne!(pull(&hub, cache.path()).code, Some(0));
    let blobs = std::fs::read_dir(cache.path().join("hub/models--owner--name/blobs")).unwrap().flatten();
    let part = blobs.map(|e| e.path()).find(|p| p.extension().is_some_and(|e| e == "part")).unwrap();
    std::fs::write(&part, vec![7; 2_000_000]).unwrap();
    let said = pull(&hub, cache.path());
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_whole(cache.path());
}

#[test]
fn a_wrong_checksum_is_refused_and_forgotten() {
    let cache = tempfile::tempdir().unwrap();
    let hub = llama();
    hub.behaviour().headers.insert("etag", format!("\"{}\"", "ab".repeat(32)));
    let said = pull(&hub, cache.path());
    assert_refused(&said, &["SHA-256", "expected abab"]);
    assert_nothing_pulled(cache.path());
    hub.behaviour().headers.clear();
    assert_eq!(pull(&hub, cache.path()).code, Some(0));
    assert_whole(cache.path());
}

#[test]
fn statuses_become_sentences() {
    for (status, part) in
        [(404, "no such repository"), (401, "HF_TOKEN"), (403, "HF_TOKEN"), (429, "429"), (500, "status 500")]
    {
        let cache = tempfile::tempdir().unwrap();
        let hub = HubDouble::start(Behaviour { status: Some(status), ..Behaviour::default() });
        assert_refused(&pull(&hub, cache.path()), &["owner/name", part]);
        assert_nothing_pulled(cache.path());
    }
}

#[test]
fn a_listed_file_that_is_missing_is_a_sentence() {
    let cache = tempfile::tempdir().unwrap();
    let hub = llama();
    hub.behaviour().files.remove("tokenizer.json");
    hub.behaviour().also_listed.push("tokenizer.json".into());
    assert_refused(&pull(&hub, cache.path()), &["no such repository, revision or file"]);
    assert_nothing_pulled(cache.path());
}

#[test]
fn answers_that_make_no_sense_become_sentences() {
    for listing in
        ["", "<html>", "[]", "{\"sha\":1}", "{\"sha\":\"a\",\"siblings\":3}", "{\"sha\":\"a\",\"siblings\":[]}"]
    {
        let cache = tempfile::tempdir().unwrap();
        let hub = llama();
        hub.behaviour().listing = Some(listing.to_owned());
        assert_refused(&pull(&hub, cache.path()), &["owner/name"]);
        assert_nothing_pulled(cache.path());
    }
    for header in ["etag", "x-repo-commit", "content-range"] {
        for value in ["", "bytes 0-0/many things"] {
            let cache = tempfile::tempdir().unwrap();
            let hub = llama();
            hub.behaviour().headers.insert(header, value.to_owned());
            assert_refused(&pull(&hub, cache.path()), &["owner/name"]);
            assert_nothing_pulled(cache.path());
        }
    }
    for location in ["", "http://[broken", "//"] {
        let cache = tempfile::tempdir().unwrap();
        let hub = llama();
        hub.behaviour().redirects = true;
        hub.behaviour().headers.insert("location", location.to_owned());
        assert_refused(&pull(&hub, cache.path()), &["owner/name"]);
        assert_nothing_pulled(cache.path());
    }
}

#[test]
fn names_and_tags_that_leave_the_cache_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("deep/deeper/cache");
    let hub = llama();
    hub.behaviour().also_listed.extend(["../evil.safetensors".into(), "/tmp/evil.safetensors".into(), "..".into()]);
    assert_eq!(pull(&hub, &cache).code, Some(0));
    assert_whole(&cache);
    assert!(!hub.behaviour().requests.join("\n").contains("evil"));

    let only_evil = HubDouble::start(Behaviour { also_listed: vec!["../../evil.gguf".into()], ..Behaviour::default() });
    assert_refused(&pull_as(&only_evil, &cache, "owner/name@other"), &["no GGUF file"]);

    let outside = folder.path().join("outside");
    for (header, value) in [
        ("etag", format!("\"{}\"", outside.display())),
        ("etag", "\"../../../../outside\"".into()),
        ("x-repo-commit", outside.display().to_string()),
        ("x-repo-commit", "../../../../../outside".into()),
    ] {
        hub.behaviour().headers.clear();
        hub.behaviour().headers.insert(header, value);
        assert_refused(&pull_as(&hub, &cache, "owner/name@third"), &[header]);
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().flatten().map(|e| e.file_name()).collect();
    assert_eq!(left, ["deep"]);
}

#[test]
fn one_gguf_and_a_revision_with_a_slash() {
    let cache = tempfile::tempdir().unwrap();
    let gguf = pagemill_formats::testing::GgufWriter::default()
        .str("general.architecture", "llama")
        .f32_tensor("token_embd.weight", &[4, 32], &[0.5; 128])
        .build();
    let files = [("tiny.gguf".to_owned(), gguf), ("config.json".to_owned(), b"{}".to_vec())];
    let hub = HubDouble::start(Behaviour { files: files.into(), ..Behaviour::default() });
    let said = pull_as(&hub, cache.path(), "owner/name@refs/pr/1");
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.out.trim_end().ends_with("owner--name--refs--pr--1/tiny.gguf"), "{}", said.out);
    assert!(hub.behaviour().requests.join("\n").contains("refs%2Fpr%2F1/tiny.gguf"));
    let mut inspect = pagemill(cache.path());
    let said = finish(inspect.env("HF_ENDPOINT", "http://127.0.0.1:9").args(["inspect", "owner/name@refs/pr/1"]));
    assert!(said.code == Some(0) && said.out.contains("GGUF version 3"), "{}", said.err);
}

#[test]
fn several_ggufs_are_listed() {
    let cache = tempfile::tempdir().unwrap();
    let files = ["a.Q4_0.gguf", "a.Q8_0.gguf"].map(|n| (n.to_owned(), Vec::new()));
    let hub = HubDouble::start(Behaviour { files: files.into(), ..Behaviour::default() });
    assert_refused(&pull(&hub, cache.path()), &["several GGUF files", "a.Q4_0.gguf, a.Q8_0.gguf"]);
}

#[test]
fn without_a_network() {
    let cache = tempfile::tempdir().unwrap();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = pagemill(cache.path());
    let said = finish(command.env("HF_ENDPOINT", format!("http://{closed}")).args(["pull", "owner/name"]));
    assert_refused(&said, &["owner/name", "no network?"]);
    let said = finish(command.env("HF_ENDPOINT", "ftp://somewhere"));
    assert_refused(&said, &["HF_ENDPOINT = ftp://somewhere"]);
}
