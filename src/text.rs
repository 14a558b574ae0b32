//! Text of others, made fit to be shown: what a daemon, a new binary or a server says must not move a cursor or fake a
//! line.

use serde_json::Value;

/// One line without control characters.
pub(crate) fn printable(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => ' ',
        c if c.is_control() => '\u{fffd}',
        c => c,
    };
    text.trim().chars().map(shown).collect()
}

/// The same for every string in a JSON value.
pub(crate) fn printable_value(value: &mut Value) {
    match value {
        Value::String(text) => *text = printable(text),
        Value::Array(values) => values.iter_mut().for_each(printable_value),
        Value::Object(fields) => fields.values_mut().for_each(printable_value),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn nothing_moves_the_cursor_or_fakes_a_line() {
        assert_eq!(printable(" a\u{1b}[2Jb\nc\r\td\u{9b}1m\n"), "a\u{fffd}[2Jb c\u{fffd} d\u{fffd}1m");
    }
}
