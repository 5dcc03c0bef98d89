//! Whatever is wrong with what was typed or with a file: one clear sentence and a code other than 0.

use crate::binary::{Said, assert_refused, finish, pagemill, run, run_with_input, zoo, zoo_copy};
use pagemill_formats::testing::GgufWriter;
use std::fs;
use std::path::{Path, PathBuf};

fn model() -> String {
    zoo("llama").display().to_string()
}

fn ask(flags: &[&str]) -> Said {
    let model = model();
    let mut arguments = vec!["run", "-m", &model, "-n", "3"];
    arguments.extend(flags);
    run(&arguments)
}

#[test]
fn a_wrong_command_line() {
    let model = model();
    let cases: &[(&[&str], &str)] = &[
        (&["serve", "--no-such-flag"], "--no-such-flag"),
        (&["serv"], "'serve'"),
        (&["inspect"], "<FILE>"),
        (&["serve", &model, "--port", "99999"], "99999"),
        (&["run", "-m", &model, "--seed", "-1", "hi"], "invalid value '-1' for '--seed"),
        (&["run", "-m", &model, "--continuous-batching=perhaps", "hi"], "[possible values: true, false]"),
    ];
    for (arguments, part) in cases {
        let said = run(arguments);
        assert_refused(&said, &[part]);
        assert_eq!(said.code, Some(2), "{arguments:?}");
    }
}

#[test]
fn without_arguments_the_commands_are_listed() {
    let said = run::<&str>(&[]);
    assert_eq!((said.code, said.out.as_str()), (Some(2), ""));
    for command in ["run", "chat", "serve", "pull", "inspect", "plan", "bench"] {
        assert!(said.err.contains(&format!("\n  {command} ")), "{command}: {}", said.err);
    }
    let version = run(&["--version"]);
    assert_eq!((version.code, version.out), (Some(0), format!("pagemill {}\n", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn settings_out_of_range_name_their_key() {
    let cases: &[(&[&str], &str)] = &[
        (&["--max-seq-len", "0", "hi"], "max_seq_len = 0"),
        (&["--max-seq-len", "99999999", "hi"], "max_seq_len"),
        (&["--block-size", "17", "hi"], "block_size = 17"),
        (&["--kv-cache-bytes", "10XB", "hi"], "unknown unit XB"),
        (&["--kv-cache-bytes", "plenty", "hi"], "kv_cache_bytes = plenty: not a size"),
        (&["--kv-cache-bytes", "1", "hi"], "not enough memory"),
        (&["--threads", "1000000", "hi"], "threads = 1000000"),
        (&["--kv-dtype", "int2", "hi"], "kv_dtype = int2"),
        (&["--isa", "z80", "hi"], "isa = z80"),
        (&["--max-batch-tokens", "2", "--max-batch-size", "3", "hi"], "max_batch_tokens = 2"),
        (
            &["-tp", "3", "hi"],
            "tensor_parallel = 3: 4 query heads and 2 KV heads do not divide over 3 ranks; possible are 1, 2, 4",
        ),
        (&["-pp", "5", "hi"], "pipeline_parallel = 5: 4 layers do not make 5 stages"),
        (&["--tensor-parallel-size", "0", "hi"], "tensor_parallel = 0"),
        (&["-pp=2", "--micro-batches", "33", "hi"], "micro_batches = 33"),
        (&["--temperature", "5", "hi"], "--temperature"),
        (&["--temperature", "-1", "hi"], "--temperature"),
        (&["--top-p", "nan", "hi"], "--top-p"),
        (&["--max-tokens", "0", "hi"], "--max-tokens"),
    ];
    for (flags, part) in cases {
        assert_refused(&ask(&flags.iter().copied().filter(|f| !f.is_empty()).collect::<Vec<_>>()), &[part]);
    }
}

#[test]
fn sizes_that_are_large_but_possible_work() {
    for flags in [["--max-batch-size", "100000", "hi"], ["--prefill-chunk-size", "1", "hi"], ["--threads", "64", "hi"]]
    {
        let said = ask(&flags);
        assert_eq!(said.code, Some(0), "{flags:?}: {}", said.err);
        assert!(!said.out.trim().is_empty());
    }
}

#[test]
fn prompts_that_cannot_be_answered() {
    assert_refused(&ask(&[""]), &["the prompt is empty"]);
    assert_refused(&ask(&["--raw", ""]), &["the prompt is empty"]);
    assert_refused(&ask(&[]), &["the prompt is empty"]);
    let long = "again and again ".repeat(40);
    assert_refused(&ask(&["--max-seq-len", "64", &long]), &["the prompt has", "the context holds 64"]);
}

#[test]
fn variables_are_named_when_they_are_wrong() {
    let cache = tempfile::tempdir().unwrap();
    let with = |name: &str, value: &str| {
        finish(pagemill(cache.path()).env(name, value).args(["run", "-m", &model(), "-n", "2", "hi"]))
    };
    assert_refused(&with("PAGEMILL_BLOCK_SIZE", "junk"), &["PAGEMILL_BLOCK_SIZE", "junk"]);
    assert_refused(&with("PAGEMILL_PREFIX_CACHE", "junk"), &["PAGEMILL_PREFIX_CACHE"]);
    assert_refused(&with("PAGEMILL_KV_CACHE_BYTES", "junk"), &["kv_cache_bytes = junk"]);
    assert_refused(&with("PAGEMILL_LOG", "a=b=c"), &["--log a=b=c"]);
    let empty = with("PAGEMILL_BLOCK_SIZE", "");
    assert_eq!(empty.code, Some(0), "set but empty counts as not set: {}", empty.err);
    // A flag wins over its variable.
    let flag = finish(pagemill(cache.path()).env("PAGEMILL_KV_DTYPE", "int2").args([
        "run",
        "-m",
        &model(),
        "-n",
        "2",
        "--kv-dtype",
        "f32",
        "hi",
    ]));
    assert_eq!(flag.code, Some(0), "{}", flag.err);
}

#[test]
fn wrong_settings_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pagemill.toml");
    let path = file.display().to_string();
    let cases = [
        ("blok_size = 16\n", "blok_size"),
        ("port = \"high\"\n", "port: invalid type"),
        ("block_size = 17\n", "block_size = 17"),
        ("block_size = 16\nport = \n", "line 2"),
        ("\u{0}", "line 1"),
    ];
    for (text, part) in cases {
        fs::write(&file, text).unwrap();
        let line = assert_refused(&run(&["serve", &model(), "--port", "0", "--config", &path]), &[part]);
        assert!(part.contains(" = ") || line.contains(&path), "{line}");
    }
    let missing = run(&["serve", &model(), "--config", "/no/such.toml"]);
    let line = assert_refused(&missing, &["/no/such.toml", "No such file"]);
    assert_eq!(line.matches("No such file").count(), 1, "{line}");
    fs::write(&file, format!("model = {:?}\nmax_seq_len = 0\n", model())).unwrap();
    assert_refused(&run(&["plan", "--config", &path]), &["max_seq_len = 0"]);
}

#[test]
fn models_that_are_not_there() {
    assert_refused(&run(&["inspect", "no-such-name"]), &["no-such-name", "smollm2-135m", "owner/name"]);
    assert_refused(&run(&["serve", "./missing.gguf", "--port", "0"]), &["./missing.gguf: no such file"]);
    assert_refused(&run(&["run", "-m", "/no/such/folder", "hi"]), &["/no/such/folder: no such file"]);
    assert_refused(&run(&["pull", "no-such-name"]), &["no-such-name"]);
    let empty = tempfile::tempdir().unwrap();
    assert_refused(&run(&["plan", &empty.path().display().to_string()]), &["holds no model"]);
}

#[test]
fn folders_with_a_part_missing() {
    for part in ["config.json", "tokenizer.json", "model.safetensors"] {
        let folder = zoo_copy("llama");
        fs::remove_file(folder.path().join(part)).unwrap();
        let path = folder.path().display().to_string();
        assert_refused(&run(&["run", "-m", &path, "-n", "3", "hi"]), &[part.trim_start_matches("model.")]);
    }
}

#[test]
fn folders_with_a_part_damaged() {
    for (part, bytes) in
        [("config.json", &b"{"[..]), ("tokenizer.json", b"[]"), ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}")]
    {
        let folder = zoo_copy("llama");
        fs::write(folder.path().join(part), bytes).unwrap();
        let path = folder.path().display().to_string();
        assert_refused(&run(&["run", "-m", &path, "-n", "3", "hi"]), &[part]);
    }
}

fn tiny_gguf() -> Vec<u8> {
    GgufWriter::default()
        .str("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .f32_tensor("token_embd.weight", &[4, 32], &[0.5; 128])
        .build()
}

fn assert_cut_is_refused(folder: &Path, bytes: &[u8], cut: usize) {
    let file: PathBuf = folder.join("cut.gguf");
    fs::write(&file, &bytes[..cut]).unwrap();
    let path = file.display().to_string();
    for arguments in [vec!["inspect", &path], vec!["run", "-m", &path, "hi"], vec!["serve", "--port", "0", &path]] {
        let said = run(&arguments);
        assert_ne!(said.code, Some(0), "{arguments:?} cut at {cut}");
        let last = said.err.lines().last().unwrap_or_default();
        assert!(
            last.starts_with("pagemill: ") && last.contains("cut.gguf"),
            "{arguments:?} cut at {cut}: {}",
            said.err
        );
    }
}

#[test]
fn truncated_gguf_files() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = tiny_gguf();
    for cut in [0, 3, 4, 23, 24, 60, bytes.len() - 512, bytes.len() - 1] {
        assert_cut_is_refused(folder.path(), &bytes, cut);
    }
    let other = folder.path().join("notes.txt");
    fs::write(&other, "no model at all").unwrap();
    assert_refused(&run(&["inspect", &other.display().to_string()]), &["notes.txt", "not a GGUF file"]);
}

#[test]
fn a_truncated_real_model() {
    let Some(models) = std::env::var_os("PAGEMILL_TEST_MODELS") else {
        println!("skipped: PAGEMILL_TEST_MODELS names no folder of real models");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let ggufs = fs::read_dir(models).unwrap().flatten().map(|e| e.path());
    for path in ggufs.filter(|p| p.extension().is_some_and(|e| e == "gguf")) {
        let bytes = fs::read(path).unwrap();
        for cut in [1000, bytes.len() / 2, bytes.len() - 1] {
            assert_cut_is_refused(folder.path(), &bytes, cut);
        }
    }
}

#[test]
fn a_model_without_a_template_does_not_chat() {
    let folder = zoo_copy("llama");
    fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let path = folder.path().display().to_string();
    assert_refused(&run(&["chat", &path]), &["no chat template", "--raw"]);
    assert_refused(&run(&["run", "-m", &path, "--system", "s", "hi"]), &["--system needs a chat template"]);
    assert_refused(&ask(&["--raw", "--system", "s", "hi"]), &["--system needs a chat template"]);
    let said = run_with_input(&["run", "-m", &path, "-n", "4", "--temperature", "0"], "the small house\n");
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.out.starts_with("the small house"), "{}", said.out);
}

#[test]
fn a_cache_folder_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let said = finish(pagemill(&file.join("cache")).args(["pull", "smollm2-135m"]));
    assert_refused(&said, &["cache folder", "file/cache"]);
}

/// A launcher's processes that cannot belong together must not become several servers.
#[test]
fn a_launcher_that_started_something_else() {
    let cache = tempfile::tempdir().unwrap();
    let cases: &[(&[(&str, &str)], &str)] = &[
        (&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")], "mpirun started 4 processes"),
        (&[("OMPI_COMM_WORLD_RANK", "1")], "OMPI_COMM_WORLD_SIZE is not"),
        (&[("LWS_GROUP_SIZE", "2"), ("LWS_WORKER_INDEX", "1")], "run mpirun on the leader"),
        #[cfg(not(feature = "mpi"))]
        (&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")], "built without MPI"),
    ];
    for (variables, part) in cases {
        let mut command = pagemill(cache.path());
        command.args(["serve", &model(), "--port", "0", "--tensor-parallel", "2"]).envs(variables.iter().copied());
        assert_refused(&finish(&mut command), &[part]);
    }
    // What cannot join others must not run once for each.
    let model = model();
    let alone: &[&[&str]] = &[
        &["chat", &model],
        &["bench", "kernels", &model],
        &["bench", "all-reduce"],
        &["bench", "perplexity", &model, "--text", "a.txt"],
        &["bench", "ranks", &model],
        &["bench", "throughput", &model],
        &["bench", "serve", &model],
    ];
    for arguments in alone {
        let mut command = pagemill(cache.path());
        command.args(*arguments).envs([("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")]);
        let part = "keeps its ranks in one process, but a launcher started 2";
        assert_refused(&finish(&mut command), &[part, &format!("pagemill {}", arguments[0])]);
    }
}
