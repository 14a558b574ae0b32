//! Rung 2: who may know whom. Imports point down, the installation module is seen through its interface, only the edge
//! prints and exits, and only one file knows where things are.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

#[path = "layers/source.rs"]
mod source;

use source::Source;

/// Tools that know nothing of what is above them, and the tools that each may use.
const TOOLS: &[(&str, &[&str])] = &[
    ("host", &[]),
    ("interrupt", &[]),
    ("http", &[]),
    ("text", &[]),
    ("durable", &["host"]),
    ("command", &["host", "interrupt", "text"]),
    ("systemd", &["command"]),
    ("line", &[]),
    ("lock", &["text"]),
    ("docker", &["http", "text"]),
    ("storage", &["durable", "host"]),
];

/// What of the installation module the daemon and the operator's client see: to hold admission for a mutation, to read
/// an attempt and what is installed, to ask for an installation. What changes an installation takes an `Admission`,
/// which neither can make.
const INTERFACE: [&str; 11] = [
    "admission",
    "attempt",
    "events",
    "installed",
    "records",
    "release",
    "source",
    "upgrade",
    "Request",
    "Unresolved",
    "install",
];

/// Every file below `src`, but for the two shims.
fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    collect(Path::new("src"), &mut found);
    assert!(found.len() > 20);
    found
}

fn collect(dir: &Path, found: &mut Vec<Source>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if path != Path::new("src/bin") {
                collect(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(Source::read(&path));
        }
    }
}

/// What a part of the crate may name of the crate: nothing said is everything.
fn may(part: &str, path: &[String]) -> bool {
    let at = |number: usize| path.get(number).map_or("", String::as_str);
    let top = at(0);
    if top == part || path.is_empty() {
        return true;
    }
    if let Some((_, tools)) = TOOLS.iter().find(|(tool, _)| *tool == part) {
        return tools.contains(&top);
    }
    let is_tool = TOOLS.iter().any(|(tool, _)| *tool == top);
    match part {
        "install" => is_tool,
        "daemon" if top == "deploy" => true,
        "daemon" | "operator" | "deploy" | "volume_plugin" => {
            is_tool || (top == "install" && INTERFACE.contains(&at(1)))
        }
        "cli" | "lib" => true,
        other => panic!("src/{other} is in no layer: give it one here"),
    }
}

#[test]
fn imports_point_down() {
    let mut wrong = BTreeSet::new();
    for source in sources() {
        for path in source.paths() {
            if !may(source.part(), &path) {
                wrong.insert(format!("{}: crate::{}", source.file, path.join("::")));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_rules_are_rules() {
    let path = |text: &str| text.split("::").map(str::to_owned).collect::<Vec<_>>();
    for (part, named, expected) in [
        ("install", "cli::output", false),
        ("install", "daemon::api", false),
        ("install", "durable::write_whole", true),
        ("daemon", "install::admission::MutationAdmission", true),
        ("daemon", "install::activation::activate", false),
        ("daemon", "install::staging", false),
        ("daemon", "cli::Exit", false),
        ("command", "host::Account", true),
        ("command", "install::attempt", false),
        ("host", "command::Run", false),
        ("cli", "install::staging", true),
    ] {
        assert_eq!(may(part, &path(named)), expected, "{part} {named}");
    }
    let source = Source::of(
        "src/daemon/api.rs",
        "use crate::install::{self, admission::{Observed, observe}, attempt as a};\nuse super::identity;\n\
         // use crate::cli;\nlet x = \"crate::cli\"; let c = '\"'; use super::super::host::Host; fn f<'a>() {}\n\
         #[cfg(test)]\nmod tests { use crate::cli::Exit; }\n",
    );
    let named: Vec<_> = source.paths().iter().map(|path| path.join("::")).collect();
    let expected = [
        "install",
        "install::admission::Observed",
        "install::admission::observe",
        "install::attempt",
        "daemon::identity",
        "host::Host",
    ];
    assert_eq!(named, expected);
    assert_eq!(source.literals, ["crate::cli"]);
}

#[test]
fn only_the_edge_prints_and_exits() {
    // The fetch child speaks to its parent through its standard streams: they are its protocol, and nobody's screen.
    const PROTOCOL: [&str; 1] = ["src/install/fetch.rs"];
    let words = [
        "print!",
        "println!",
        "eprint!",
        "eprintln!",
        "dbg!",
        "process::exit",
        "process::abort",
        "panic!",
        "todo!",
    ];
    for source in sources().iter().filter(|source| source.part() != "cli") {
        for word in words {
            assert!(!source.has(word), "{}: {word}", source.file);
        }
        for stream in ["stdout()", "stderr()"] {
            assert!(
                !source.has(stream) || PROTOCOL.contains(&source.file.as_str()),
                "{}: {stream}",
                source.file
            );
        }
    }
}

/// Paths outside of `src/host.rs`, and why.
const PATHS: [(&str, &str, &str); 6] = [
    (
        "src/command.rs",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "where tools are looked for",
    ),
    ("src/install/units.rs", "/usr/local/bin/ployzd", "the text that shipped unit files hold"),
    (
        "src/install/units.rs",
        "/usr/local/lib/systemd/system",
        "the text of a link in a system that is not running",
    ),
    (
        "src/install/activation.rs",
        "/usr/sbin/restorecon",
        "a tool that may be missing is looked for, not run",
    ),
    ("src/install/activation.rs", "/sbin/restorecon", "the same"),
    ("src/cli/install.rs", "/usr/local/bin/ployzd", "what to type where the own path is not known"),
];

#[test]
fn only_one_file_knows_where_things_are() {
    let is_path = |text: &String| {
        let top =
            ["/usr", "/etc", "/var", "/run", "/opt", "/sbin", "/bin", "/home", "/root", "/tmp", "/boot"];
        let starts = top
            .iter()
            .any(|top| text.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')));
        starts && !text.contains([' ', '{'])
    };
    let mut used = BTreeSet::new();
    for source in sources().iter().filter(|source| source.file != "src/host.rs") {
        for literal in source.literals.iter().filter(|literal| is_path(literal)) {
            let known = PATHS.iter().find(|(file, path, _)| *file == source.file && path == literal);
            let Some((file, path, _)) = known else {
                panic!("{}: {literal:?}: ask Host for it", source.file)
            };
            used.insert((*file, *path));
        }
    }
    let listed: BTreeSet<_> = PATHS.iter().map(|(file, path, _)| (*file, *path)).collect();
    assert_eq!(used, listed, "what is listed is needed");
}

#[test]
fn no_script_but_the_bootstrap_is_carried() {
    for source in sources() {
        for literal in &source.literals {
            let script = literal.starts_with("#!")
                || literal.contains("set -e")
                || literal == "sh"
                || literal == "bash";
            assert!(!script && !literal.ends_with("/sh"), "{}: {literal:?}", source.file);
        }
    }
    let bootstrap: Vec<_> =
        fs::read_dir("bootstrap").unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let scripts = bootstrap.iter().filter(|name| name.to_string_lossy().ends_with(".sh"));
    assert_eq!(scripts.collect::<Vec<_>>(), ["machine.sh"]);
}

#[test]
fn files_are_of_a_size_that_can_be_read() {
    for source in sources() {
        let lines = fs::read_to_string(&source.file).unwrap().lines().count();
        assert!(lines <= 800, "{} has {lines} lines", source.file);
    }
}
