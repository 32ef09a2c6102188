//! Libraries that are looked for when somebody needs them, and never linked: where they lie, and their functions.
//!
//! Knows nothing of what they do. One that was loaded stays so: such libraries start threads, register handlers and load
//! code into devices, which outlive any of its users.

use std::path::{Path, PathBuf};

pub use libloading::Library;

/// Where a library is looked for.
pub struct Places {
    /// Names that the system's loader is asked for, in this order; then these names in `directories`.
    pub names: &'static [&'static str],
    /// Where installers put it, beside the loader's own directories.
    pub directories: &'static [&'static str],
}

impl Places {
    /// Loads the library: the one that `setting` names (a library, or the directory that it lies in), and no other; else the
    /// first of the usual places.
    ///
    /// # Errors
    /// Every place with the loader's words, if there is none.
    pub fn load(&self, setting: Option<&str>) -> Result<(&'static Library, PathBuf), Vec<String>> {
        let mut tried = Vec::new();
        for path in self.candidates(setting) {
            // SAFETY: loading runs the library's initialisers; it is the one of these names, or what the user named as such.
            match unsafe { Library::new(&path) } {
                Ok(library) => return Ok((Box::leak(Box::new(library)), path)),
                Err(error) => tried.push(format!("{}: {}", path.display(), reason(&error, &path))),
            }
        }
        Err(tried)
    }

    fn candidates(&self, setting: Option<&str>) -> Vec<PathBuf> {
        let names_in = |dir: &Path| self.names.iter().map(|name| dir.join(name)).collect::<Vec<_>>();
        match setting.map(Path::new) {
            Some(path) if path.is_dir() => names_in(path),
            Some(path) => vec![path.to_path_buf()],
            None => {
                let in_directories = self.directories.iter().flat_map(|dir| names_in(Path::new(dir)));
                self.names.iter().map(PathBuf::from).chain(in_directories).collect()
            }
        }
    }
}

/// The loader's own sentence, without the path that it repeats.
fn reason(error: &libloading::Error, path: &Path) -> String {
    let text = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    text.trim_start_matches(&format!("{}: ", path.display())).to_owned()
}

/// Declares `Functions`, a library's functions by their names in it, and `Functions::of`, which looks them up or names those
/// that the library lacks. The types have to be those of the library's header.
macro_rules! functions {
    ($header:literal; $($field:ident = $name:literal: fn($($argument:ty),* $(,)?) -> $result:ty;)+) => {
        #[doc = concat!("The functions that are used, with the types of ", $header, ".")]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)+
        }

        impl Functions {
            fn of(library: &'static $crate::dylib::Library) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the type is the header's, and the library is never unloaded.
                    let $field = unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> $result>($name) }
                        .map(|symbol| *symbol)
                        .map_err(|_| missing.push($name));
                )+
                match ($($field,)+) {
                    ($(Ok($field),)+) => Ok(Self { $($field),+ }),
                    _ => Err(missing),
                }
            }
        }
    };
}
pub(crate) use functions;

/// A shared object of these C functions, for tests; absent where there is no compiler.
#[cfg(test)]
pub fn made<'a>(dir: &Path, name: &str, functions: impl IntoIterator<Item = &'a str>) -> Option<PathBuf> {
    let (source, library) = (dir.join(format!("{name}.c")), dir.join(name));
    let text: String = functions.into_iter().map(|function| format!("{function}\n")).collect();
    std::fs::write(&source, text).expect("a source");
    let compiler = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .arg(&library)
        .arg(&source)
        .output()
        .ok()?;
    assert!(compiler.status.success(), "{}", String::from_utf8_lossy(&compiler.stderr));
    Some(library)
}
