//! Writing to people: lines that survive a closed pipe, colour only where it is seen.

use std::io::{self, IsTerminal, Write};

/// What a piece of text is, for colour.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Style {
    /// The name of a stage or field.
    Dim,
    /// A failure.
    Red,
    /// Something to type.
    Bold,
}

/// One of the standard streams.
#[derive(Debug)]
pub(crate) struct Output<W> {
    stream: W,
    colour: bool,
}

/// Standard output.
pub(crate) fn stdout() -> Output<io::Stdout> {
    let stream = io::stdout();
    let colour = colourful(stream.is_terminal());
    Output { stream, colour }
}

/// Standard error.
pub(crate) fn stderr() -> Output<io::Stderr> {
    let stream = io::stderr();
    let colour = colourful(stream.is_terminal());
    Output { stream, colour }
}

fn colourful(terminal: bool) -> bool {
    terminal
        && std::env::var_os("NO_COLOR").is_none()
        && std::env::var_os("TERM").is_some_and(|t| t != "dumb")
}

impl<W: Write> Output<W> {
    /// Writes a line. A closed stream is an error that most callers have no use for.
    pub(crate) fn line(&mut self, text: impl AsRef<str>) -> io::Result<()> {
        let mut line = text.as_ref().to_owned();
        line.push('\n');
        self.stream.write_all(line.as_bytes())?;
        self.stream.flush()
    }

    /// Writes a line of a terminal over the one before it.
    pub(crate) fn again(&mut self, text: impl AsRef<str>) -> io::Result<()> {
        self.stream.write_all(format!("\r\u{1b}[K{}", text.as_ref()).as_bytes())?;
        self.stream.flush()
    }

    /// Text in a style, where colour is seen.
    pub(crate) fn styled(&self, style: Style, text: impl AsRef<str>) -> String {
        let text = text.as_ref();
        if !self.colour {
            return text.to_owned();
        }
        let code = match style {
            Style::Dim => 2,
            Style::Red => 31,
            Style::Bold => 1,
        };
        format!("\u{1b}[{code}m{text}\u{1b}[0m")
    }

    /// A line of a table: two spaces, a name in a column of its own, a value.
    pub(crate) fn field(&mut self, name: &str, value: impl AsRef<str>) -> io::Result<()> {
        let name = self.styled(Style::Dim, format!("{name:<12}"));
        self.line(format!("  {name}{}", value.as_ref()))
    }

    /// `help: …`
    pub(crate) fn help(&mut self, text: &str) -> io::Result<()> {
        let text = match text.split_once(": ") {
            Some((what, command)) => format!("{what}: {}", self.styled(Style::Bold, command)),
            None => text.to_owned(),
        };
        self.line(format!("help: {text}"))
    }
}

/// Says why a command could not be carried out, on stderr.
pub(crate) fn error(text: impl AsRef<str>, help: Option<&str>) {
    let mut stderr = stderr();
    let what = stderr.styled(Style::Red, "error:");
    let _ = stderr.line(format!("{what} {}", text.as_ref()));
    if let Some(help) = help {
        let _ = stderr.help(help);
    }
}
