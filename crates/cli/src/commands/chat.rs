//! `pagemill chat [MODEL]`: a conversation in the terminal. Ctrl-C stops an answer, not the program.

use super::generate::{self, GenerationArgs, INTERRUPTED};
use crate::loading::{self, Show};
use crate::{ModelArgs, models::catalogue, processes, settings::ServerSettings};
use anyhow::Result;
use clap::Args;
use rustyline::error::ReadlineError;
use serde_json::Value;
use std::sync::atomic::Ordering;

/// Arguments of `pagemill chat`.
#[derive(Args)]
pub struct ChatArgs {
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows [default: smollm2-135m]
    model: Option<String>,
    /// A system message in front
    #[arg(long)]
    system: Option<String>,
    #[command(flatten)]
    generation: GenerationArgs,
    #[command(flatten)]
    shared: ModelArgs,
}

const HELP: &str = "/clear forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer";

/// Talks.
pub fn chat(args: ChatArgs) -> Result<()> {
    args.generation.validate()?;
    processes::ensure_alone("chat")?;
    let (file_model, engine, _) = args.shared.clone().merge(ServerSettings::default())?;
    let name = args.model.clone().or(file_model).unwrap_or_else(|| catalogue::DEFAULT.to_owned());
    let mut config = crate::config::engine_config(engine)?;
    config.engine.max_batch_size.get_or_insert(1);
    let model = loading::load_model(&name, &config, Show::Progress)?;
    // Fails at once, and not after the first question, when the model cannot chat.
    generate::encode_chat(&model, &[generate::message("user", "hello")])?;
    generate::catch_interrupts()?;
    println!("{name}. {HELP}");
    let opening: Vec<Value> = args.system.as_deref().map(|s| generate::message("system", s)).into_iter().collect();
    let mut messages = opening.clone();
    let mut editor = rustyline::DefaultEditor::new()?;
    loop {
        let line = match editor.readline("> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => {
                println!("{HELP}");
                continue;
            }
            Err(ReadlineError::Eof) => break,
            Err(e) => return Err(e.into()),
        };
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" | "/bye" => break,
            "/clear" => {
                messages.clone_from(&opening);
                println!("forgotten");
                continue;
            }
            "/help" | "/?" => {
                println!("{HELP}");
                continue;
            }
            question => {
                let _ = editor.add_history_entry(question);
                messages.push(generate::message("user", question));
            }
        }
        INTERRUPTED.store(false, Ordering::SeqCst);
        match generate::encode_chat(&model, &messages).and_then(|ids| generate::answer(&model, ids, &args.generation)) {
            Ok(answer) => {
                println!("{}", if answer.reason.is_none() { " [stopped]" } else { "" });
                messages.push(generate::message("assistant", &answer.text));
            }
            Err(e) => {
                // The conversation goes on without the question that could not be answered.
                eprintln!("{e:#}");
                messages.pop();
            }
        }
    }
    model.engine.handle.shutdown();
    Ok(())
}
