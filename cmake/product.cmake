# kvs_product(): libkvspan.so and libkvspan.a from the objects of all layers, their install rules,
# the pkg-config file and the CMake package.
#
# Both expose kvs_* only. The shared library does it with a version script. The archive holds a
# single relocatable object whose hidden symbols are made local, so that an application may define
# the names that the library uses inside.
function(kvs_product)
    get_property(layers GLOBAL PROPERTY KVS_LAYERS)
    get_property(extern GLOBAL PROPERTY KVS_EXTERN)
    list(REMOVE_DUPLICATES extern)
    set(objects "")
    foreach(layer ${layers})
        list(APPEND objects "$<TARGET_OBJECTS:kvs_${layer}>")
    endforeach()
    set(map "${PROJECT_SOURCE_DIR}/cmake/kvspan.map")

    add_library(kvspan SHARED ${objects})
    add_library(kvspan::kvspan ALIAS kvspan)
    set_target_properties(kvspan PROPERTIES LINKER_LANGUAGE C LINK_DEPENDS "${map}"
        VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
    target_link_options(kvspan PRIVATE "LINKER:--version-script=${map}")
    if(NOT KVS_SANITIZE)
        target_link_options(kvspan PRIVATE LINKER:-z,defs)
    endif()
    target_link_libraries(kvspan PRIVATE "$<BUILD_INTERFACE:kvs_flags>" ${extern})
    target_include_directories(kvspan INTERFACE
        "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>" "$<BUILD_INTERFACE:${KVS_GEN_DIR}>"
        "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")

    set(one "${CMAKE_BINARY_DIR}/kvspan_all.o")
    set(archive "${CMAKE_BINARY_DIR}/libkvspan.a")
    add_custom_command(OUTPUT "${archive}"
        COMMAND "${CMAKE_LINKER}" -r -o "${one}" ${objects}
        COMMAND "${CMAKE_OBJCOPY}" --localize-hidden "${one}"
        COMMAND "${CMAKE_COMMAND}" -E rm -f "${archive}"
        COMMAND "${CMAKE_AR}" rcs "${archive}" "${one}"
        DEPENDS ${objects} COMMENT "Linking the archive libkvspan.a"
        COMMAND_EXPAND_LISTS VERBATIM)
    add_custom_target(kvspan_archive ALL DEPENDS "${archive}")
    add_library(kvspan_static INTERFACE)
    add_library(kvspan::kvspan_static ALIAS kvspan_static)
    add_dependencies(kvspan_static kvspan_archive)
    target_link_libraries(kvspan_static INTERFACE "$<BUILD_INTERFACE:${archive}>"
        "$<INSTALL_INTERFACE:$<INSTALL_PREFIX>/${CMAKE_INSTALL_LIBDIR}/libkvspan.a>" ${extern})
    set_property(TARGET kvspan_static PROPERTY INTERFACE_LINK_DEPENDS
        "$<BUILD_INTERFACE:${archive}>")
    target_include_directories(kvspan_static INTERFACE
        "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>" "$<BUILD_INTERFACE:${KVS_GEN_DIR}>"
        "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")

    kvs_install("${archive}" "${extern}")
endfunction()

# What the link line of an application with the archive carries besides it, as one string.
function(kvs_static_libs out extern)
    set(line "")
    foreach(lib ${extern})
        if(lib STREQUAL "Threads::Threads")
            string(APPEND line " -pthread")
        elseif(lib STREQUAL "MPI::MPI_C")
            string(JOIN " " mpi ${MPI_C_LIBRARIES})
            string(APPEND line " ${mpi}")
        elseif(lib MATCHES "::")
            message(FATAL_ERROR "kvs_static_libs: how to link ${lib} is not known here")
        elseif(lib MATCHES "^[-/]")
            string(APPEND line " ${lib}")
        else()
            string(APPEND line " -l${lib}")
        endif()
    endforeach()
    string(STRIP "${line}" line)
    set(${out} "${line}" PARENT_SCOPE)
endfunction()

function(kvs_install archive extern)
    include(CMakePackageConfigHelpers)
    install(TARGETS kvspan kvspan_static EXPORT kvspan)
    install(FILES "${archive}" DESTINATION "${CMAKE_INSTALL_LIBDIR}")
    install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/kvspan" "${KVS_GEN_DIR}/kvspan"
            DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")
    install(EXPORT kvspan NAMESPACE kvspan:: FILE kvspan-targets.cmake
            DESTINATION "${CMAKE_INSTALL_LIBDIR}/cmake/kvspan")

    # The file finds its prefix from where it lies, so that the tree may be installed anywhere.
    file(RELATIVE_PATH KVS_PC_UP "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
    kvs_static_libs(KVS_PC_PRIVATE "${extern}")
    set(KVS_FIND_MPI "")
    if(KVS_MPI)
        set(KVS_FIND_MPI "find_dependency(MPI COMPONENTS C)")
    endif()
    configure_file("${PROJECT_SOURCE_DIR}/cmake/kvspan.pc.in" "${CMAKE_BINARY_DIR}/kvspan.pc" @ONLY)
    configure_file("${PROJECT_SOURCE_DIR}/cmake/kvspan-config.cmake.in"
                   "${CMAKE_BINARY_DIR}/kvspan-config.cmake" @ONLY)
    write_basic_package_version_file("${CMAKE_BINARY_DIR}/kvspan-config-version.cmake"
                                     COMPATIBILITY SameMinorVersion)
    install(FILES "${CMAKE_BINARY_DIR}/kvspan.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
    install(FILES "${CMAKE_BINARY_DIR}/kvspan-config.cmake"
                  "${CMAKE_BINARY_DIR}/kvspan-config-version.cmake"
            DESTINATION "${CMAKE_INSTALL_LIBDIR}/cmake/kvspan")
endfunction()
