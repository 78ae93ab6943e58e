//! Parser of the string form, which follows `k8s.io/apimachinery/pkg/labels`.

use super::error::SelectorError;
use super::requirement::Requirement;
use crate::abbreviate::abbreviate;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SelectorToken<'a> {
    /// A key, a value, `in` or `notin`: the position decides.
    Word(&'a str),
    /// `=` and `==`.
    Equals,
    NotEquals,
    Not,
    Greater,
    Less,
    Open,
    Close,
    Comma,
    End,
}

pub(super) fn parse_requirements(text: &str) -> Result<Vec<Requirement>, SelectorError> {
    let mut parser = Parser { text, rest: text };
    let mut requirements = Vec::new();
    if parser.peek() == SelectorToken::End {
        return Ok(requirements);
    }
    loop {
        requirements.push(parser.parse_requirement()?);
        match parser.next() {
            SelectorToken::End => return Ok(requirements),
            SelectorToken::Comma => {}
            found => return Err(parser.unexpected(found, "a comma or the end")),
        }
    }
}

struct Parser<'a> {
    text: &'a str,
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn parse_requirement(&mut self) -> Result<Requirement, SelectorError> {
        let negated = self.peek() == SelectorToken::Not;
        if negated {
            self.next();
        }
        let key = self.expect_word("a label key")?;
        if negated {
            return Requirement::presence(key, false);
        }
        match self.peek() {
            SelectorToken::End | SelectorToken::Comma => Requirement::presence(key, true),
            _ => match self.next() {
                SelectorToken::Equals => Requirement::membership(key, false, vec![self.parse_value()?]),
                SelectorToken::NotEquals => Requirement::membership(key, true, vec![self.parse_value()?]),
                SelectorToken::Greater => Requirement::comparison(key, true, &self.parse_value()?),
                SelectorToken::Less => Requirement::comparison(key, false, &self.parse_value()?),
                SelectorToken::Word("in") => Requirement::membership(key, false, self.parse_value_list()?),
                SelectorToken::Word("notin") => Requirement::membership(key, true, self.parse_value_list()?),
                found => Err(self.unexpected(found, "one of = == != in notin < > , or the end")),
            },
        }
    }

    /// One value after an operator; the value may be empty.
    fn parse_value(&mut self) -> Result<String, SelectorError> {
        match self.peek() {
            SelectorToken::End | SelectorToken::Comma => Ok(String::new()),
            _ => self.expect_word("a label value").map(str::to_owned),
        }
    }

    /// A list in brackets. Between two commas the value may be empty; `()` has one value, the empty one, as in
    /// Kubernetes.
    fn parse_value_list(&mut self) -> Result<Vec<String>, SelectorError> {
        match self.next() {
            SelectorToken::Open => {}
            found => return Err(self.unexpected(found, "an opening bracket")),
        }
        let mut values = Vec::new();
        loop {
            let value = match self.peek() {
                SelectorToken::Word(word) => {
                    self.next();
                    word
                }
                _ => "",
            };
            if !values.iter().any(|v| v == value) {
                values.push(value.to_owned());
            }
            match self.next() {
                SelectorToken::Comma => {}
                SelectorToken::Close => return Ok(values),
                found => return Err(self.unexpected(found, "a comma or a closing bracket")),
            }
        }
    }

    fn expect_word(&mut self, expected: &'static str) -> Result<&'a str, SelectorError> {
        match self.next() {
            SelectorToken::Word(word) => Ok(word),
            found => Err(self.unexpected(found, expected)),
        }
    }

    fn peek(&self) -> SelectorToken<'a> {
        split_token(self.rest).0
    }

    fn next(&mut self) -> SelectorToken<'a> {
        let (token, rest) = split_token(self.rest);
        self.rest = rest;
        token
    }

    fn unexpected(&self, found: SelectorToken<'_>, expected: &'static str) -> SelectorError {
        let found = match found {
            SelectorToken::Word(word) => format!("{:?}", abbreviate(word)),
            SelectorToken::Equals => "=".to_owned(),
            SelectorToken::NotEquals => "!=".to_owned(),
            SelectorToken::Not => "!".to_owned(),
            SelectorToken::Greater => ">".to_owned(),
            SelectorToken::Less => "<".to_owned(),
            SelectorToken::Open => "(".to_owned(),
            SelectorToken::Close => ")".to_owned(),
            SelectorToken::Comma => "a comma".to_owned(),
            SelectorToken::End => "the end".to_owned(),
        };
        SelectorError::Syntax { text: abbreviate(self.text), found, expected }
    }
}

/// Splits off the first token.
fn split_token(text: &str) -> (SelectorToken<'_>, &str) {
    let text = text.trim_start_matches([' ', '\t', '\r', '\n']);
    for (sign, token) in [
        ("==", SelectorToken::Equals),
        ("=", SelectorToken::Equals),
        ("!=", SelectorToken::NotEquals),
        ("!", SelectorToken::Not),
        (">", SelectorToken::Greater),
        ("<", SelectorToken::Less),
        ("(", SelectorToken::Open),
        (")", SelectorToken::Close),
        (",", SelectorToken::Comma),
    ] {
        if let Some(rest) = text.strip_prefix(sign) {
            return (token, rest);
        }
    }
    if text.is_empty() {
        return (SelectorToken::End, "");
    }
    let end = text.find(['=', '!', '>', '<', '(', ')', ',', ' ', '\t', '\r', '\n']).unwrap_or(text.len());
    (SelectorToken::Word(&text[..end]), &text[end..])
}
