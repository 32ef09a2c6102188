//! YAML text as a small tree whose every node knows where it stands and how it was written.
//!
//! Knows nothing of keys and their types. Anchors, aliases and tags are refused: a deployment is read by people, and
//! each of them can change what another line means.

use serde_saphyr::granit_parser::{Event, Parser, ScalarStyle, ScanError, Span, StructureStyle};

use super::error::{ConfigError, Place};
use super::scalar::Scalar;

/// Mappings inside mappings that are read; the deepest key has two.
const MAX_DEPTH: usize = 8;

/// Where a node starts, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    pub line: usize,
    pub column: usize,
}

impl Mark {
    pub fn at(self, file: &str) -> Place {
        Place { file: file.to_owned(), line: self.line, column: self.column }
    }
}

/// A value and where it starts.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    pub mark: Mark,
    pub value: Value,
}

/// What a node holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Scalar(Scalar),
    Mapping(Vec<Entry>),
    /// A list; no key takes one, so its items are not kept.
    List,
}

/// A key with its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub key: String,
    pub mark: Mark,
    /// Whether it stands in a `{...}` mapping.
    pub in_braces: bool,
    pub node: Node,
}

impl Value {
    /// The kind of value, for messages.
    pub fn shown(&self) -> String {
        match self {
            Self::Scalar(scalar) => scalar.shown(),
            Self::Mapping(_) => "a mapping".to_owned(),
            Self::List => "a list".to_owned(),
        }
    }
}

struct Reader<'a> {
    file: &'a str,
    text: &'a str,
    parser: Parser<'a, serde_saphyr::granit_parser::StrInput<'a>>,
}

/// Reads one document. No node: the text holds nothing but comments.
///
/// # Errors
/// If it is not YAML, is more than one document, or uses an anchor, an alias or a tag.
pub fn read(text: &str, file: &str) -> Result<Option<Node>, ConfigError> {
    let mut reader = Reader { file, text, parser: Parser::new_from_str(text) };
    let mut root = None;
    while let Some((event, span)) = reader.next()? {
        match event {
            Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => {}
            Event::DocumentStart(..) if root.is_some() => {
                return Err(reader.refuse(span, "a second document starts here", "; a deployment is one document"));
            }
            Event::DocumentStart(..) => {}
            event => root = Some(reader.node(event, span, 0)?),
        }
    }
    // An explicit `---` with nothing below it reads as an empty scalar.
    Ok(root.filter(|node| !matches!(&node.value, Value::Scalar(scalar) if scalar.is_null() && scalar.text.is_empty())))
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<Option<(Event<'a>, Span)>, ConfigError> {
        loop {
            match self.parser.next_event() {
                None => return Ok(None),
                Some(Ok((Event::Comment(..), _))) => {}
                Some(Ok(next)) => return Ok(Some(next)),
                Some(Err(error)) => return Err(self.syntax(&error)),
            }
        }
    }

    fn expect(&mut self) -> Result<(Event<'a>, Span), ConfigError> {
        let end = Mark { line: self.text.lines().count().max(1), column: 1 };
        self.next()?.ok_or_else(|| ConfigError::Syntax {
            at: end.at(self.file),
            problem: "the file ends in the middle of a value".to_owned(),
            cure: "",
        })
    }

    fn node(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<Node, ConfigError> {
        let mark = mark(span);
        if depth > MAX_DEPTH {
            return Err(self.refuse(span, "mappings are nested too deeply", "; sections hold keys, keys hold values"));
        }
        let (anchor, is_tagged) = match &event {
            Event::Scalar(_, _, anchor, tag) => (*anchor, tag.is_some()),
            Event::SequenceStart(_, anchor, tag) | Event::MappingStart(_, anchor, tag) => (*anchor, tag.is_some()),
            Event::Alias(_) => (1, false),
            _ => (0, false),
        };
        if anchor != 0 {
            return Err(self.refuse(span, "anchors and aliases are not read", "; write the value out"));
        }
        if is_tagged {
            return Err(self.refuse(span, "tags are not read", "; remove it, each key has one type"));
        }
        let value = match event {
            Event::Scalar(text, style, ..) => {
                let quoted = style != ScalarStyle::Plain;
                // The parser reports a value that is not there as `~`, with an empty span.
                let is_absent = !quoted && span.start.index() == span.end.index();
                Value::Scalar(Scalar { text: if is_absent { String::new() } else { text.into_owned() }, quoted })
            }
            Event::MappingStart(style, ..) => Value::Mapping(self.entries(style == StructureStyle::Flow, depth)?),
            Event::SequenceStart(..) => {
                self.skip_list(depth)?;
                Value::List
            }
            other => return Err(self.refuse(span, &format!("unexpected {other:?}"), "")),
        };
        Ok(Node { mark, value })
    }

    fn entries(&mut self, in_braces: bool, depth: usize) -> Result<Vec<Entry>, ConfigError> {
        let mut entries = Vec::new();
        loop {
            let (event, span) = self.expect()?;
            if event == Event::MappingEnd {
                return Ok(entries);
            }
            let key = self.node(event, span, depth + 1)?;
            let Value::Scalar(name) = key.value else {
                return Err(self.refuse(span, "a key is a name", "; a list or a mapping cannot be one"));
            };
            let (event, span) = self.expect()?;
            let node = self.node(event, span, depth + 1)?;
            entries.push(Entry { key: name.text, mark: key.mark, in_braces, node });
        }
    }

    fn skip_list(&mut self, depth: usize) -> Result<(), ConfigError> {
        loop {
            let (event, span) = self.expect()?;
            if event == Event::SequenceEnd {
                return Ok(());
            }
            self.node(event, span, depth + 1)?;
        }
    }

    fn refuse(&self, span: Span, problem: &str, cure: &'static str) -> ConfigError {
        ConfigError::Syntax { at: mark(span).at(self.file), problem: problem.to_owned(), cure }
    }

    fn syntax(&self, error: &ScanError) -> ConfigError {
        let mark = Mark { line: error.marker().line(), column: error.marker().col() + 1 };
        let line = self.text.lines().nth(mark.line.saturating_sub(1)).unwrap_or("");
        let indent = &line[..line.len() - line.trim_start().len()];
        let cure = if indent.contains('\t') {
            "; this line is indented with a tab, YAML indents with spaces"
        } else if ["mapping values are not allowed", "did not find expected key", "indent"]
            .iter()
            .any(|sign| error.info().contains(sign))
        {
            "; check the indentation: the keys of one section start in the same column"
        } else {
            ""
        };
        ConfigError::Syntax { at: mark.at(self.file), problem: error.info(), cure }
    }
}

fn mark(span: Span) -> Mark {
    Mark { line: span.start.line(), column: span.start.col() + 1 }
}
