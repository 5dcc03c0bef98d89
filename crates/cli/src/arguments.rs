//! From the command line to [`Cli`], and from a fault in it to one sentence. Knows no command's meaning.

use crate::{Cli, environment};
use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches};
use std::ffi::OsString;
use std::process::ExitCode;

/// What programs return for a wrong command line.
const USAGE_EXIT_CODE: u8 = 2;

/// Reads the command line and the `PAGEMILL_*` variables.
///
/// # Errors
/// The code to exit with, after help, version or one sentence about the fault was printed.
pub fn parse() -> Result<Cli, ExitCode> {
    let outcome = adjusted(Cli::command())
        .try_get_matches_from(spelled_out(std::env::args_os()))
        .and_then(|mut matches| Cli::from_arg_matches_mut(&mut matches));
    outcome.map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A reader that went away (`--help | head -1`) is no fault.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(USAGE_EXIT_CODE)
        }
        _ => {
            eprintln!("pagemill: {}", sentence(&error));
            ExitCode::from(USAGE_EXIT_CODE)
        }
    })
}

/// Short flags of two letters, as other engines have them, in full: clap would take `-tp 2` for `-t p`.
const TWO_LETTERS: [(&str, &str); 2] = [("-tp", "--tensor-parallel"), ("-pp", "--pipeline-parallel")];

/// The command line without [`TWO_LETTERS`]. What follows `--` stays.
fn spelled_out(arguments: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut is_over = false;
    arguments.map(move |argument| {
        is_over |= argument == "--";
        let Some(text) = argument.to_str().filter(|_| !is_over) else { return argument };
        let (flag, value) = text.find('=').map_or((text, ""), |at| text.split_at(at));
        TWO_LETTERS
            .iter()
            .find(|(short, _)| *short == flag)
            .map_or(argument.clone(), |(_, long)| format!("{long}{value}").into())
    })
}

/// A set but empty variable counts as not set (service files and compose files write them so), and `-5` is
/// a value: a wrong one is told so, and not that no such flag exists.
fn adjusted(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let empty = arg.get_env().is_some_and(environment::is_empty);
        let arg = if empty { arg.env(Resettable::Reset) } else { arg };
        if arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg }
    });
    command.mut_subcommands(adjusted)
}

/// clap's paragraphs as one line: what is wrong, and its tip.
fn sentence(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let mut paragraphs = text.split("\n\n").map(one_line);
    let mut line = paragraphs.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    if let Some(variable) = guilty_variable(error) {
        line.push_str(&format!(" (from {variable})"));
    }
    for paragraph in paragraphs {
        if let Some(tip) = paragraph.strip_prefix("tip: ") {
            line.push_str("; ");
            line.push_str(tip);
        }
    }
    line.push_str("; --help shows what there is");
    line
}

fn one_line(paragraph: &str) -> String {
    paragraph.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The variable that a refused value came from: a person who typed no such flag looks for it in vain.
fn guilty_variable(error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let argument = text(ContextKind::InvalidArg)?;
    let value = text(ContextKind::InvalidValue)?;
    let flag = argument.split([' ', '[', '=']).next()?;
    let typed = std::env::args().any(|a| a == flag || a.starts_with(&format!("{flag}=")));
    let variable = format!("PAGEMILL_{}", flag.trim_start_matches('-').replace('-', "_").to_uppercase());
    (!typed && environment::holds(&variable, value)).then_some(variable)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn refusal(arguments: &[&str]) -> String {
        let error = adjusted(Cli::command()).try_get_matches_from(arguments).unwrap_err();
        sentence(&error)
    }

    #[test]
    fn the_commands_are_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn two_letters_are_one_flag() {
        let given = ["pagemill", "run", "-tp", "2", "-pp=3", "-t", "4", "--", "-tp"];
        let spelled: Vec<OsString> = spelled_out(given.into_iter().map(OsString::from)).collect();
        let expected = ["pagemill", "run", "--tensor-parallel", "2", "--pipeline-parallel=3", "-t", "4", "--", "-tp"];
        assert_eq!(spelled, expected.map(OsString::from));
    }

    #[test]
    fn a_wrong_command_line_is_one_line() {
        let cases: [(&[&str], &str); 5] = [
            (&["pagemill", "serv"], "'serve'"),
            (&["pagemill", "inspect"], "<FILE>"),
            (&["pagemill", "serve", "--port", "99999"], "99999"),
            (&["pagemill", "run", "--max-seq-len", "-5", "hi"], "invalid value '-5'"),
            (&["pagemill", "run", "--prefix-cache=perhaps", "hi"], "[possible values: true, false]"),
        ];
        for (arguments, part) in cases {
            let line = refusal(arguments);
            assert!(line.contains(part) && !line.contains('\n') && !line.starts_with("error"), "{line}");
        }
    }
}
