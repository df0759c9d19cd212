//! Completion of `kubectl moe`: what kubectl asks of `kubectl_complete-moe`, and scripts of shells
//! ask the same way.
//!
//! The answer is a candidate a line, then `:N`, as cobra's directives go: 4 offers no files, 0
//! does, 2 adds no space.

use clap::{Arg, ArgAction, Command};

const FILES: &str = ":0";
const NO_FILES: &str = ":4";

/// What can stand at the place of the last word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// These words.
    Words(Vec<String>),
    Files,
    /// Jobs of this namespace, or of the context's.
    Jobs,
    Namespaces,
    Contexts,
    Nothing,
}

/// `words` are those after `kubectl moe`; the last one is being typed.
pub fn wanted(command: &Command, words: &[String]) -> Wanted {
    let Some((typed, before)) = words.split_last() else { return Wanted::Nothing };
    let mut verb: Option<&Command> = None;
    let mut awaited: Option<&Arg> = None;
    let mut options = true;
    for word in before {
        if awaited.take().is_some() {
            continue;
        }
        if word == "--" {
            options = false;
        } else if options && word.starts_with('-') {
            let name = word.split('=').next().unwrap_or(word);
            let found = option(command, verb, name);
            awaited = found.filter(|arg| takes_value(arg) && !word.contains('='));
        } else if verb.is_none() {
            verb = command.get_subcommands().find(|one| one.get_name() == word);
            if verb.is_none() {
                return Wanted::Nothing;
            }
        }
    }
    if let Some(arg) = awaited {
        return value_of(arg);
    }
    if options && typed.starts_with('-') {
        if let Some((name, _)) = typed.split_once('=') {
            let with = |word: &String| format!("{name}={word}");
            return match option(command, verb, name).map(value_of) {
                Some(Wanted::Words(words)) => Wanted::Words(words.iter().map(with).collect()),
                Some(other) => other,
                None => Wanted::Nothing,
            };
        }
        let mut words: Vec<String> = all_options(command, verb)
            .filter(|arg| !arg.is_hide_set())
            .filter_map(|arg| Some(described(&format!("--{}", arg.get_long()?), arg.get_help())))
            .collect();
        words.sort();
        words.dedup();
        return Wanted::Words(words);
    }
    match verb {
        None => {
            let verbs = command.get_subcommands().filter(|one| !one.is_hide_set());
            Wanted::Words(verbs.map(|one| described(one.get_name(), one.get_about())).collect())
        }
        Some(verb) => match verb.get_name() {
            "show" | "logs" | "top" | "cancel" | "hold" | "release" => Wanted::Jobs,
            "submit" | "validate" | "plan" => Wanted::Files,
            "completion" => {
                Wanted::Words(["bash", "zsh", "fish"].map(str::to_string).to_vec())
            }
            _ => Wanted::Nothing,
        },
    }
}

fn all_options<'c>(
    command: &'c Command,
    verb: Option<&'c Command>,
) -> impl Iterator<Item = &'c Arg> {
    let verb = verb.into_iter().flat_map(Command::get_arguments);
    command.get_arguments().chain(verb).filter(|arg| !arg.is_positional())
}

fn option<'c>(command: &'c Command, verb: Option<&'c Command>, name: &str) -> Option<&'c Arg> {
    let short = name.strip_prefix('-').filter(|name| name.len() == 1);
    let short = short.and_then(|name| name.chars().next());
    let long = name.strip_prefix("--");
    let is = |arg: &&Arg| {
        (long.is_some() && arg.get_long() == long) || (short.is_some() && arg.get_short() == short)
    };
    all_options(command, verb).find(is)
}

fn takes_value(arg: &Arg) -> bool {
    let optional = arg.get_num_args().is_some_and(|range| range.min_values() == 0);
    matches!(arg.get_action(), ArgAction::Set | ArgAction::Append) && !optional
}

fn value_of(arg: &Arg) -> Wanted {
    let values = arg.get_possible_values();
    match arg.get_id().as_str() {
        "namespace" | "operator_namespace" => Wanted::Namespaces,
        "context" => Wanted::Contexts,
        "kubeconfig" | "filename" | "nodes" => Wanted::Files,
        _ if !values.is_empty() => {
            let shown = values.iter().filter(|value| !value.is_hide_set());
            Wanted::Words(shown.map(|value| value.get_name().to_string()).collect())
        }
        _ => Wanted::Nothing,
    }
}

/// A word and, after a tab, what it is.
fn described(word: &str, about: Option<&clap::builder::StyledStr>) -> String {
    let about = about.map(ToString::to_string).unwrap_or_default();
    match about.lines().next() {
        Some(about) if !about.is_empty() => format!("{word}\t{about}"),
        _ => word.to_string(),
    }
}

/// The answer: those of `words` that begin with what is typed, and the directive.
pub fn answer(wanted: &Wanted, typed: &str, found: &[String]) -> String {
    let (words, directive) = match wanted {
        Wanted::Words(words) => (words.as_slice(), NO_FILES),
        Wanted::Files => (found, FILES),
        Wanted::Jobs | Wanted::Namespaces | Wanted::Contexts => (found, NO_FILES),
        Wanted::Nothing => (found, NO_FILES),
    };
    let mut text = String::new();
    for word in words.iter().filter(|word| word.starts_with(typed)) {
        text += word;
        text.push('\n');
    }
    text + directive + "\n"
}

/// A script for a shell, for those who call the binary by its own name.
pub fn script(shell: &str) -> &'static str {
    match shell {
        "zsh" => ZSH,
        "fish" => FISH,
        _ => BASH,
    }
}

const BASH: &str = "\
# bash completion of kubectl-moe; `kubectl moe` itself is completed by kubectl's own script, which
# asks kubectl_complete-moe.
_kubectl_moe() {
  local answer directive current=${COMP_WORDS[COMP_CWORD]}
  answer=$(kubectl_complete-moe \"${COMP_WORDS[@]:1:COMP_CWORD}\" 2>/dev/null) || return
  directive=${answer##*:}
  mapfile -t COMPREPLY < <(sed -e '$d' -e 's/\\t.*//' <<<\"$answer\")
  if [ \"$directive\" = 0 ] && [ ${#COMPREPLY[@]} = 0 ]; then
    mapfile -t COMPREPLY < <(compgen -f -- \"$current\")
  fi
}
complete -F _kubectl_moe kubectl-moe
";

const ZSH: &str = "\
#compdef kubectl-moe
# zsh completion of kubectl-moe; `kubectl moe` itself is completed by kubectl's own script.
_kubectl_moe() {
  local -a lines
  lines=(\"${(@f)$(kubectl_complete-moe \"${(@)words[2,CURRENT]}\" 2>/dev/null)}\")
  local directive=${lines[-1]}
  lines[-1]=()
  lines=(\"${(@)lines//:/\\\\:}\")
  lines=(\"${(@)lines//$'\\t'/:}\")
  (( ${#lines} )) && _describe 'kubectl-moe' lines
  [[ $directive == ':0' ]] && _files
}
compdef _kubectl_moe kubectl-moe
";

const FISH: &str = "\
# fish completion of kubectl-moe; `kubectl moe` itself is completed by kubectl's own script.
function __kubectl_moe
  set -l words (commandline -opc) (commandline -ct)
  set -l answer (kubectl_complete-moe $words[2..-1] 2>/dev/null)
  test (count $answer) -gt 0; or return
  printf '%s\\n' $answer[1..-2]
  test $answer[-1] = ':0'; and __fish_complete_path (commandline -ct)
end
complete -c kubectl-moe -f -a '(__kubectl_moe)'
";

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn asked(line: &str) -> Wanted {
        let words: Vec<String> = line.split(' ').map(str::to_string).collect();
        wanted(&super::super::Plugin::command(), &words)
    }

    fn words(line: &str) -> String {
        let typed = line.rsplit(' ').next().unwrap_or_default();
        answer(&asked(line), typed, &[]).replace('\n', "|")
    }

    #[test]
    fn verbs_options_and_values_are_offered() {
        let verbs = words("");
        for verb in ["submit", "queue", "show", "logs", "top", "cancel", "hold", "release", "plan",
            "doctor", "validate"]
        {
            assert!(verbs.contains(&format!("|{verb}\t")) || verbs.starts_with(verb), "{verb}");
        }
        assert!(words("que").starts_with("queue\t") && words("que").ends_with("|:4|"));
        assert!(words("queue --al").contains("--all-namespaces\t"));
        assert!(words("logs --kube").starts_with("--kubeconfig\t"), "{}", words("logs --kube"));
        assert_eq!(words("queue -o "), "json|yaml|wide|name|:4|");
        assert_eq!(words("queue --output=y"), "--output=yaml|:4|");
        assert_eq!(words("submit --wait=r"), "--wait=running|:4|");
        assert_eq!(words("nonsense "), ":4|");
    }

    #[test]
    fn names_and_files_stand_where_they_belong() {
        assert_eq!(asked("show "), Wanted::Jobs);
        assert_eq!(asked("-n team show "), Wanted::Jobs);
        assert_eq!(asked("show -n "), Wanted::Namespaces);
        assert_eq!(asked("--context "), Wanted::Contexts);
        assert_eq!(asked("submit "), Wanted::Files);
        assert_eq!(asked("submit -f "), Wanted::Files);
        assert_eq!(asked("submit --hold job"), Wanted::Files);
        assert_eq!(asked("queue "), Wanted::Nothing);
        let found = ["a-1".to_string(), "b-1".to_string()];
        assert_eq!(answer(&Wanted::Jobs, "a", &found), "a-1\n:4\n");
        assert_eq!(answer(&Wanted::Files, "x", &[]), ":0\n");
    }
}
