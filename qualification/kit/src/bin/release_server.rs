//! `release-server`: serves releases to test machines, and misbehaves when it is told to.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this is the edge of a program")]

use std::env;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use kit::{Ca, Options, Server, Tls};
use tokio::signal::unix::{SignalKind, signal};

/// Serves a directory over HTTPS to test machines, and misbehaves when it is told to.
///
/// Prints one line when it listens and ends on SIGTERM or SIGINT.
#[derive(Debug, Parser)]
#[command(name = "release-server", max_term_width = 100, after_help = EXAMPLES)]
struct Arguments {
    /// The document root
    #[arg(value_name = "DIR", required_unless_present = "make_ca")]
    root: Option<PathBuf>,
    /// A loopback or lab address [default: 10.77.0.1:443, with --plain 10.77.0.1:80]
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
    /// The authority is kept in DIR/ca [default: $PLOYZ_QUALIFICATION_DIR or /var/cache/ployz-qualification]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Makes the authority if it is missing, prints its certificate's path, and ends
    #[arg(long, conflicts_with = "root")]
    make_ca: bool,
    /// Whether, and how, the certificate is wrong
    #[arg(long, value_enum, default_value = "good", conflicts_with = "plain")]
    certificate: Certificate,
    /// HTTP instead of HTTPS
    #[arg(long)]
    plain: bool,
    /// A JSON array of rules, read again whenever the file changes
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// A Unix socket for GET, PUT, POST and DELETE of /_rules, GET and DELETE of /_log
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Appends each request as a line of JSON
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
}

const EXAMPLES: &str = r#"Rules, of which the first that matches applies (path: exact, or with *):
  [{"path": "/v1/stable", "times": 2, "status": 503, "headers": {"Retry-After": "1"}},
   {"path": "*.tar.gz", "cut": {"after": 100000, "how": "reset"}},
   {"accept": "hang", "times": 1}]

  which requests:  path method after times
  the connection:  accept: hang close reset garbage
  the answer:      delay_ms status headers body raw redirect: {"to": URL} loop {"chain": N}
                   interim huge_header range: ignore shifted mislabelled changed-etag replaced refuse
  the body:        announce: nothing chunked {"length": N}  flip extra endless
                   drip: {"bytes": N, "every_ms": MS, "head": true}
                   cut: {"after": N, "how": "stall|close|abrupt|reset"}  close

  curl --unix-socket PATH -X PUT --data @rules.json http://server/_rules
  curl --unix-socket PATH http://server/_log"#;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Certificate {
    Good,
    Expired,
    NotYetValid,
    WrongName,
    UnknownIssuer,
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("release-server: {problem}");
            if problem.kind() == io::ErrorKind::AddrNotAvailable {
                eprintln!("help: the lab's address is there after: qualification/machine net-up");
                eprintln!(
                    "help: and is reached by:                qualification/machine lab qualification/release-server DIR"
                );
            }
            ExitCode::from(4)
        }
    }
}

fn run(arguments: Arguments) -> io::Result<()> {
    let state = arguments.state.clone().unwrap_or_else(default_state).join("ca");
    match arguments.root.clone() {
        Some(root) => serve(arguments, root, &state),
        None => {
            authority(&state)?;
            println!("{}", state.join("ca.pem").display());
            Ok(())
        }
    }
}

fn serve(arguments: Arguments, root: PathBuf, state: &Path) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Before the line is printed: whoever has read it may send a signal.
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let server = start(arguments, root, state)?;
        let ca = if server.url().starts_with("https:") {
            format!("ca: {}", state.join("ca.pem").display())
        } else {
            "not encrypted".to_owned()
        };
        println!("release-server: {} serves {} ({ca})", server.url(), server.root().display());
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        Ok(())
    })
}

fn start(arguments: Arguments, root: PathBuf, state: &Path) -> io::Result<Server> {
    let tls = match arguments.certificate {
        _ if arguments.plain => Tls::Plain,
        Certificate::Good => Tls::Good,
        Certificate::Expired => Tls::Expired,
        Certificate::NotYetValid => Tls::NotYetValid,
        Certificate::WrongName => Tls::WrongName,
        Certificate::UnknownIssuer => Tls::UnknownIssuer,
    };
    let port = if arguments.plain { 80 } else { 443 };
    let ca = if arguments.plain { None } else { Some(authority(state)?) };
    Server::start(Options {
        tls,
        listen: arguments.listen.unwrap_or(SocketAddr::from(([10, 77, 0, 1], port))),
        ca,
        log: arguments.log,
        rules: arguments.rules,
        control: arguments.control,
        notice: |text| eprintln!("release-server: {text}"),
        ..Options::new(root)
    })
}

fn authority(state: &Path) -> io::Result<Ca> {
    Ca::kept_in(state).map_err(|problem| {
        io::Error::new(
            problem.kind(),
            format!("reading or making the authority in {}: {problem}", state.display()),
        )
    })
}

fn default_state() -> PathBuf {
    env::var_os("PLOYZ_QUALIFICATION_DIR")
        .map_or_else(|| "/var/cache/ployz-qualification".into(), PathBuf::from)
}
