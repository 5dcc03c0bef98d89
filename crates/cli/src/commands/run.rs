//! `pagemill run [--model MODEL] PROMPT`: one prompt, one streamed answer.

use super::generate::{self, GenerationArgs};
use crate::loading::{self, Home, Show};
use crate::processes::{self, Part};
use crate::{ModelArgs, models::catalogue, settings::ServerSettings};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::io::{IsTerminal, Read, Write};

/// Arguments of `pagemill run`.
#[derive(Args)]
pub struct RunArgs {
    /// What to ask; `-` or nothing reads standard input
    prompt: Option<String>,
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows [default: smollm2-135m]
    #[arg(short, long)]
    model: Option<String>,
    /// A system message in front
    #[arg(long)]
    system: Option<String>,
    /// Continue the text as it is, without the chat template
    #[arg(long)]
    raw: bool,
    /// Print speed and token counts to standard error
    #[arg(short, long)]
    verbose: bool,
    #[command(flatten)]
    generation: GenerationArgs,
    #[command(flatten)]
    shared: ModelArgs,
}

/// Answers.
pub fn run(args: RunArgs) -> Result<()> {
    args.generation.validate()?;
    let (file_model, engine, _) = args.shared.clone().merge(ServerSettings::default())?;
    let name = args.model.clone().or(file_model).unwrap_or_else(|| catalogue::DEFAULT.to_owned());
    let mut config = crate::config::engine_config_among(processes::count()?, engine)?;
    config.engine.max_batch_size.get_or_insert(1);
    // Before the prompt is read: a launcher gives standard input to rank 0 alone.
    let leading = match processes::join(&config, 0)? {
        Part::Following(following) => return following.run(&name, &config),
        Part::Leading(leading) => Some(leading),
        Part::Alone => None,
    };
    let prompt = read_prompt(args.prompt.as_deref())?;
    if prompt.trim().is_empty() && !args.raw {
        bail!("the prompt is empty: pagemill run \"Why is the sky blue?\"");
    }
    let show = if args.verbose { Show::Memory } else { Show::Progress };
    let home = leading.as_ref().map_or(Home::Threads, Home::Processes);
    let model = loading::load_model_in(home, &name, &config, show)?;
    // Until here Ctrl-C ends the program, in the middle of a download too.
    generate::catch_interrupts()?;
    let chat = !args.raw && model.text.template.is_some();
    if args.system.is_some() && !chat {
        bail!(
            "--system needs a chat template, and {}",
            if args.raw { "--raw leaves it out" } else { "this model has none" }
        );
    }
    let ids = if chat {
        let system = args.system.as_deref().map(|s| generate::message("system", s));
        let messages: Vec<_> = system.into_iter().chain([generate::message("user", &prompt)]).collect();
        generate::encode_chat(&model, &messages)?
    } else {
        model.text.tokenizer.encode_completion(&prompt)?
    };
    if args.raw || !chat {
        print_now(&prompt)?;
    }
    let answer = generate::answer(&model, ids, &args.generation)?;
    print_now("\n")?;
    if args.verbose {
        let usage = answer.usage;
        #[allow(clippy::cast_precision_loss)] // token counts
        let (prefill, decode) = (
            usage.prompt_tokens as f64 / answer.first_token_s.max(1e-9),
            usage.completion_tokens.saturating_sub(1) as f64 / answer.decode_s.max(1e-9),
        );
        eprintln!(
            "{} prompt tokens at {prefill:.0} tok/s, {} generated at {decode:.1} tok/s, first token after {:.0} ms",
            usage.prompt_tokens,
            usage.completion_tokens,
            answer.first_token_s * 1e3
        );
    }
    model.engine.handle.shutdown();
    leading.map_or(Ok(()), |leading| leading.end())?;
    if answer.reason.is_none() {
        bail!("interrupted");
    }
    Ok(())
}

fn read_prompt(given: Option<&str>) -> Result<String> {
    match given {
        Some(text) if text != "-" => Ok(text.to_owned()),
        None if std::io::stdin().is_terminal() => bail!("no prompt: pagemill run \"Why is the sky blue?\""),
        _ => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context("reading the prompt from standard input")?;
            Ok(text.trim_end_matches('\n').to_owned())
        }
    }
}

fn print_now(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}
