//! Parser of the string form, which follows `k8s.io/apimachinery/pkg/labels`.

use super::error::SelectorError;
use super::requirement::Requirement;
use crate::abbreviate::abbreviate;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
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
    if parser.peek() == Token::End {
        return Ok(requirements);
    }
    loop {
        requirements.push(parser.parse_requirement()?);
        match parser.next() {
            Token::End => return Ok(requirements),
            Token::Comma => {}
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
        let negated = self.peek() == Token::Not;
        if negated {
            self.next();
        }
        let key = self.expect_word("a label key")?;
        if negated {
            return Requirement::presence(key, false);
        }
        match self.peek() {
            Token::End | Token::Comma => Requirement::presence(key, true),
            _ => match self.next() {
                Token::Equals => Requirement::membership(key, false, vec![self.parse_value()?]),
                Token::NotEquals => Requirement::membership(key, true, vec![self.parse_value()?]),
                Token::Greater => Requirement::comparison(key, true, &self.parse_value()?),
                Token::Less => Requirement::comparison(key, false, &self.parse_value()?),
                Token::Word("in") => Requirement::membership(key, false, self.parse_value_list()?),
                Token::Word("notin") => Requirement::membership(key, true, self.parse_value_list()?),
                found => Err(self.unexpected(found, "one of = == != in notin < > , or the end")),
            },
        }
    }

    /// One value after an operator; the value may be empty.
    fn parse_value(&mut self) -> Result<String, SelectorError> {
        match self.peek() {
            Token::End | Token::Comma => Ok(String::new()),
            _ => self.expect_word("a label value").map(str::to_owned),
        }
    }

    /// A list in brackets. Between two commas the value may be empty; `()` has one value, the empty one, as in
    /// Kubernetes.
    fn parse_value_list(&mut self) -> Result<Vec<String>, SelectorError> {
        match self.next() {
            Token::Open => {}
            found => return Err(self.unexpected(found, "an opening bracket")),
        }
        let mut values = Vec::new();
        loop {
            let value = match self.peek() {
                Token::Word(word) => {
                    self.next();
                    word
                }
                _ => "",
            };
            if !values.iter().any(|v| v == value) {
                values.push(value.to_owned());
            }
            match self.next() {
                Token::Comma => {}
                Token::Close => return Ok(values),
                found => return Err(self.unexpected(found, "a comma or a closing bracket")),
            }
        }
    }

    fn expect_word(&mut self, expected: &'static str) -> Result<&'a str, SelectorError> {
        match self.next() {
            Token::Word(word) => Ok(word),
            found => Err(self.unexpected(found, expected)),
        }
    }

    fn peek(&self) -> Token<'a> {
        split_token(self.rest).0
    }

    fn next(&mut self) -> Token<'a> {
        let (token, rest) = split_token(self.rest);
        self.rest = rest;
        token
    }

    fn unexpected(&self, found: Token<'_>, expected: &'static str) -> SelectorError {
        let found = match found {
            Token::Word(word) => format!("{:?}", abbreviate(word)),
            Token::Equals => "=".to_owned(),
            Token::NotEquals => "!=".to_owned(),
            Token::Not => "!".to_owned(),
            Token::Greater => ">".to_owned(),
            Token::Less => "<".to_owned(),
            Token::Open => "(".to_owned(),
            Token::Close => ")".to_owned(),
            Token::Comma => "a comma".to_owned(),
            Token::End => "the end".to_owned(),
        };
        SelectorError::Syntax { text: abbreviate(self.text), found, expected }
    }
}

/// Splits off the first token.
fn split_token(text: &str) -> (Token<'_>, &str) {
    let text = text.trim_start_matches([' ', '\t', '\r', '\n']);
    for (sign, token) in [
        ("==", Token::Equals),
        ("=", Token::Equals),
        ("!=", Token::NotEquals),
        ("!", Token::Not),
        (">", Token::Greater),
        ("<", Token::Less),
        ("(", Token::Open),
        (")", Token::Close),
        (",", Token::Comma),
    ] {
        if let Some(rest) = text.strip_prefix(sign) {
            return (token, rest);
        }
    }
    if text.is_empty() {
        return (Token::End, "");
    }
    let end = text.find(['=', '!', '>', '<', '(', ')', ',', ' ', '\t', '\r', '\n']).unwrap_or(text.len());
    (Token::Word(&text[..end]), &text[end..])
}
