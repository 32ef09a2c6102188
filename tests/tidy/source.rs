//! A source file as the rules see it: comments, string contents and test code blanked, every line where it was.

/// A file of the project.
#[derive(Debug, Clone)]
pub struct Source {
    /// From the project's root, with `/`.
    pub path: String,
    /// As it is on disk.
    pub text: String,
    /// Rust code alone: comments, the contents of strings and items under `#[cfg(test)]` are spaces.
    pub code: String,
    /// Modules declared as `#[cfg(test)] mod name;`, or the files that their `#[path]` names: they are test code.
    pub test_modules: Vec<String>,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Self {
        let mut code = blank_comments_and_strings(text);
        let test_modules = blank_test_items(text, &mut code);
        Self { path: path.into(), text: text.into(), code: String::from_utf8_lossy(&code).into_owned(), test_modules }
    }

    /// The line, from 1, of a byte position.
    pub fn line(&self, position: usize) -> usize {
        self.text.as_bytes()[..position].iter().filter(|&&byte| byte == b'\n').count() + 1
    }

    /// Byte positions in the code where `needle` stands and is no part of a longer name.
    pub fn find_word<'a>(&'a self, needle: &'a str) -> impl Iterator<Item = usize> + 'a {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let code = self.code.as_bytes();
        self.code.match_indices(needle).map(|(position, _)| position).filter(move |&position| {
            let before = position.checked_sub(1).map(|i| code[i]);
            let after = code.get(position + needle.len()).copied();
            let begins_inside = is_name(needle.as_bytes()[0]) && before.is_some_and(is_name);
            let ends_inside = needle.bytes().last().is_some_and(is_name) && after.is_some_and(is_name);
            !begins_inside && !ends_inside
        })
    }
}

/// Replaces every byte of `range` that is no line break.
fn blank(code: &mut [u8], range: std::ops::Range<usize>) {
    for byte in &mut code[range] {
        if *byte != b'\n' {
            *byte = b' ';
        }
    }
}

fn blank_comments_and_strings(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut position = 0;
    while position < bytes.len() {
        let rest = &text[position..];
        let end = if rest.starts_with("//") {
            position + rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            position + block_comment_len(rest)
        } else if let Some(len) = raw_string_len(&text[..position], rest) {
            position + len
        } else if bytes[position] == b'"' {
            position + string_len(rest)
        } else if let Some(len) = char_len(rest) {
            position + len
        } else {
            position += rest.chars().next().map_or(1, char::len_utf8);
            continue;
        };
        blank(&mut code, position..end);
        position = end;
    }
    code
}

fn block_comment_len(rest: &str) -> usize {
    let (mut depth, mut position) = (0usize, 0);
    while position < rest.len() {
        if rest[position..].starts_with("/*") {
            depth += 1;
            position += 2;
        } else if rest[position..].starts_with("*/") {
            depth -= 1;
            position += 2;
            if depth == 0 {
                return position;
            }
        } else {
            position += rest[position..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// The length of a raw string that begins here, as `r"…"`, `r#"…"#`, `br"…"`.
fn raw_string_len(before: &str, rest: &str) -> Option<usize> {
    if before.ends_with(|c: char| c.is_alphanumeric() || c == '_') {
        return None;
    }
    let after_prefix = rest.strip_prefix("br").or_else(|| rest.strip_prefix('r'))?;
    let hashes = after_prefix.len() - after_prefix.trim_start_matches('#').len();
    let body = after_prefix[hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let body_len = body.find(&close)? + close.len();
    Some(rest.len() - body.len() + body_len)
}

fn string_len(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let mut position = 1;
    while position < bytes.len() {
        match bytes[position] {
            b'\\' => position += 2,
            b'"' => return position + 1,
            _ => position += 1,
        }
    }
    rest.len()
}

/// The length of a character literal; a lifetime is none.
fn char_len(rest: &str) -> Option<usize> {
    let body = rest.strip_prefix('\'')?;
    if body.starts_with('\\') {
        let escaped = body.char_indices().nth(1).map(|(at, c)| at + c.len_utf8())?;
        return body[escaped..].find('\'').map(|close| 1 + escaped + close + 1);
    }
    let first = body.chars().next()?;
    body[first.len_utf8()..].starts_with('\'').then_some(first.len_utf8() + 2)
}

/// Blanks what stands under `#[cfg(test)]`, and names the modules that it declares without a body.
fn blank_test_items(whole: &str, code: &mut [u8]) -> Vec<String> {
    let mut modules = Vec::new();
    let text = String::from_utf8_lossy(code).into_owned();
    let mut from = 0;
    while let Some(found) = text[from..].find("#[cfg(") {
        let start = from + found;
        let attribute_end = start + text[start..].find(']').unwrap_or(text.len() - start - 1) + 1;
        from = attribute_end;
        let words = text[start..attribute_end].split(|c: char| !c.is_alphanumeric() && c != '_');
        if !words.clone().any(|word| word == "test") || words.clone().any(|word| word == "not") {
            continue;
        }
        let end = item_end(&text, attribute_end);
        let item = text[attribute_end..end].trim();
        if item.ends_with(';')
            && let Some(name) = item.trim_end_matches(';').rsplit("mod ").next()
            && item.contains("mod ")
        {
            // Strings are blank in the code by now.
            let path = whole[attribute_end..end].split_once("#[path = \"").and_then(|(_, rest)| rest.split('"').next());
            modules.push(path.unwrap_or(name.trim()).to_string());
        }
        blank(code, start..end);
        from = end;
    }
    modules
}

/// Where the item that begins after its attributes ends: after its `;` or its closing brace.
fn item_end(text: &str, start: usize) -> usize {
    let mut depth = 0usize;
    for (offset, byte) in text.as_bytes()[start..].iter().enumerate() {
        match byte {
            b'{' | b'(' | b'[' => depth += 1,
            b'}' | b')' | b']' => {
                depth = depth.saturating_sub(1);
                if depth == 0 && *byte == b'}' {
                    return start + offset + 1;
                }
            }
            b';' if depth == 0 => return start + offset + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        Source::new("src/x.rs", text).code.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_and_strings_are_blank() {
        assert_eq!(code("a // b\nc /* d /* e */ f */ g"), "a c g");
        assert_eq!(code(r#"a("std::fs \" x") b"#), "a( ) b");
        assert_eq!(code("a(r#\"b \" c\"#, br\"d\", b\"e\") f"), "a( , , b ) f");
        assert_eq!(code("fn f<'a>(x: &'a str) { '\"' ; '\\'' ; b }"), "fn f<'a>(x: &'a str) { ; ; b }");
    }

    #[test]
    fn lines_stay_where_they_are() {
        let source = Source::new("src/x.rs", "/* a\nb */\n\"c\nd\"\nunsafe");
        let position = source.find_word("unsafe").next().expect("the word");
        assert_eq!(source.line(position), 5);
    }

    #[test]
    fn words_are_whole() {
        let source = Source::new("src/x.rs", "unsafe_op unsafe { } my_unsafe mpi::x rsmpi::y");
        assert_eq!(source.find_word("unsafe").count(), 1);
        assert_eq!(source.find_word("mpi::").count(), 1);
    }

    #[test]
    fn test_items_are_blank_and_test_files_are_named() {
        let by_path = Source::new("src/x.rs", "#[cfg(test)]\n#[path = \"x_tests.rs\"]\nmod tests;\n");
        assert_eq!(by_path.test_modules, ["x_tests.rs"]);
        let text = "a;\n#[cfg(test)]\n#[path = \"x\"]\nmod tests { fn f() { g([1; 2]) } }\n#[cfg(test)]\nmod far;\n\
                    #[cfg(all(test, unix))]\nuse b::c;\n#[cfg(not(test))]\nfn d() {}\n#[cfg(unix)]\nfn e() {}";
        let source = Source::new("src/x.rs", text);
        assert_eq!(source.test_modules, ["far"]);
        let kept = code(text);
        assert_eq!(kept, "a; #[cfg(not(test))] fn d() {} #[cfg(unix)] fn e() {}");
    }
}
