//! The string form, as `k8s.io/apimachinery/pkg/labels` reads it.

use super::{Requirement, Selector, SelectorError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    /// A key, a value, or one of the words `in` and `notin`: the place decides.
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

pub(super) fn selector(text: &str) -> Result<Selector, SelectorError> {
    let mut parser = Parser { text, rest: text };
    let mut requirements = Vec::new();
    if parser.peek() == Token::End {
        return Ok(Selector { requirements });
    }
    loop {
        requirements.push(parser.requirement()?);
        match parser.next() {
            Token::End => return Ok(Selector { requirements }),
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
    fn requirement(&mut self) -> Result<Requirement, SelectorError> {
        let negated = self.peek() == Token::Not;
        if negated {
            self.next();
        }
        let key = self.word("a label key")?;
        if negated {
            return Requirement::presence(key, false);
        }
        match self.peek() {
            Token::End | Token::Comma => Requirement::presence(key, true),
            _ => match self.next() {
                Token::Equals => Requirement::set(key, false, vec![self.value()?]),
                Token::NotEquals => Requirement::set(key, true, vec![self.value()?]),
                Token::Greater => Requirement::comparison(key, true, &self.value()?),
                Token::Less => Requirement::comparison(key, false, &self.value()?),
                Token::Word("in") => Requirement::set(key, false, self.values()?),
                Token::Word("notin") => Requirement::set(key, true, self.values()?),
                found => Err(self.unexpected(found, "one of = == != in notin < > , or the end")),
            },
        }
    }

    /// One value after an operator; nothing stands for the empty value.
    fn value(&mut self) -> Result<String, SelectorError> {
        match self.peek() {
            Token::End | Token::Comma => Ok(String::new()),
            _ => self.word("a label value").map(str::to_owned),
        }
    }

    /// A list in brackets; nothing between two commas stands for the empty value, nothing at all for no value.
    fn values(&mut self) -> Result<Vec<String>, SelectorError> {
        match self.next() {
            Token::Open => {}
            found => return Err(self.unexpected(found, "an opening bracket")),
        }
        if self.peek() == Token::Close {
            self.next();
            return Ok(Vec::new());
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

    fn word(&mut self, expected: &'static str) -> Result<&'a str, SelectorError> {
        match self.next() {
            Token::Word(word) => Ok(word),
            found => Err(self.unexpected(found, expected)),
        }
    }

    fn peek(&self) -> Token<'a> {
        token(self.rest).0
    }

    fn next(&mut self) -> Token<'a> {
        let (token, rest) = token(self.rest);
        self.rest = rest;
        token
    }

    fn unexpected(&self, found: Token<'_>, expected: &'static str) -> SelectorError {
        let found = match found {
            Token::Word(word) => format!("{:?}", crate::image::shown(word)),
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
        SelectorError::Syntax { text: crate::image::shown(self.text), found, expected }
    }
}

/// The first token and what follows it.
fn token(text: &str) -> (Token<'_>, &str) {
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
